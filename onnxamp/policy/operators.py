"""The table of operators: what precision does to each, and what each does to the range of values.

To add an operator, add its name to the row that describes it (`com.microsoft.` before ONNX Runtime's own). An operator without a row
counts as sensitive.
"""

from __future__ import annotations

import dataclasses
import enum

import onnx_ir as ir

from onnxamp.model.signatures import operator_name


class Kind(enum.Enum):
    """How an operator takes to 16 bits."""

    HEAVY = "heavy"  # the arithmetic that 16-bit units speed up; accumulates in fp32
    SENSITIVE = "sensitive"  # loses range or precision: fp32 unless asked otherwise
    NEUTRAL = "neutral"  # as good as its operands; costs memory traffic only
    MOVE = "move"  # copies or selects elements, rounds nothing


class Range(enum.Enum):
    """What an operator does to the size of values."""

    KEEPS = "keeps"
    EXPANDS = "expands"  # results can leave the 16-bit range while operands are ordinary
    RESTORES = "restores"  # results are ordinary whatever the operands


@dataclasses.dataclass(frozen=True)
class Operator:
    """One row."""

    kind: Kind
    range: Range = Range.KEEPS


_ROWS = {
    # MatMul and its relatives
    Operator(Kind.HEAVY): """
        MatMul Gemm Conv ConvTranspose DeformConv CausalConvWithState Einsum Attention LinearAttention LSTM GRU RNN
        com.microsoft.FusedMatMul com.microsoft.TransposeMatMul com.microsoft.FusedMatMulActivation com.microsoft.FusedGemm
        com.microsoft.GemmFastGelu com.microsoft.FusedConv com.microsoft.NhwcConv com.microsoft.NhwcFusedConv
        com.microsoft.ConvTransposeWithDynamicPads com.microsoft.Attention com.microsoft.MultiHeadAttention
        com.microsoft.GroupQueryAttention com.microsoft.PackedAttention com.microsoft.PackedMultiHeadAttention
        com.microsoft.DecoderAttention com.microsoft.DecoderMaskedSelfAttention com.microsoft.DecoderMaskedMultiHeadAttention
        com.microsoft.LongformerAttention com.microsoft.SparseAttention com.microsoft.PagedAttention
        com.microsoft.LinearAttention com.microsoft.CausalConvWithState com.microsoft.GatedRelativePositionBias
        com.microsoft.MatMulNBits com.microsoft.MatMulBnb4 com.microsoft.MoE com.microsoft.QMoE com.microsoft.AttnLSTM
    """,
    # Sums, powers and exponentials
    Operator(Kind.SENSITIVE, Range.EXPANDS): """
        Exp Pow Softplus ReduceSum ReduceSumSquare ReduceProd ReduceL1 CumSum CumProd Sinh Cosh Tan Det DFT STFT
        com.microsoft.Rfft com.microsoft.Irfft com.microsoft.ComplexMul com.microsoft.ComplexMulConj com.microsoft.Inverse
        com.microsoft.CDist
    """,
    # Softmax, normalizations, logarithms
    Operator(Kind.SENSITIVE, Range.RESTORES): """
        Softmax LogSoftmax Hardmax Log Reciprocal ReduceLogSum ReduceLogSumExp BatchNormalization LayerNormalization
        RMSNormalization InstanceNormalization GroupNormalization LpNormalization MeanVarianceNormalization LRN
        SimplifiedLayerNormalization com.microsoft.SkipLayerNormalization com.microsoft.SkipSimplifiedLayerNormalization
        com.microsoft.EmbedLayerNormalization com.microsoft.GroupNorm com.microsoft.SkipGroupNorm com.microsoft.BiasSoftmax
        com.microsoft.GatedRMSNorm com.microsoft.BranchwiseRMSNorm com.microsoft.RMSNormRotary
        Sin Cos Asin Acos Atan Atanh
    """,
    # Other reductions, losses, coordinates, probabilities, tables
    Operator(Kind.SENSITIVE): """
        ReduceMean ReduceL2 Asinh Acosh SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss
        GlobalLpPool LpPool GridSample AffineGrid RoiAlign MaxRoiPool com.microsoft.GridSample com.microsoft.CropAndResize
        Range MelWeightMatrix HannWindow HammingWindow BlackmanWindow Bernoulli Multinomial TfIdfVectorizer
        com.microsoft.SampleOp BitCast
    """,
    # Bounded results
    Operator(Kind.NEUTRAL, Range.RESTORES): """
        Sqrt Tanh Sigmoid HardSigmoid Erf Softsign Sign
    """,
    # Elementwise arithmetic, pooling, comparisons
    Operator(Kind.NEUTRAL): """
        Add Sub Mul Div Neg Abs Sum Mean Mod Floor Ceil Round Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu Mish
        HardSwish Swish SwiGLU Shrink Dropout AveragePool GlobalAveragePool Resize Upsample RotaryEmbedding
        Equal Greater GreaterOrEqual Less LessOrEqual IsNaN IsInf NonZero ArgMax ArgMin TopK OneHot Unique Col2Im
        RandomNormal RandomUniform RandomNormalLike RandomUniformLike
        com.microsoft.Gelu com.microsoft.FastGelu com.microsoft.QuickGelu com.microsoft.BiasGelu com.microsoft.BiasSplitGelu
        com.microsoft.BiasAdd com.microsoft.BiasDropout com.microsoft.BitmaskDropout com.microsoft.BitmaskBiasDropout
        com.microsoft.GatedAdd com.microsoft.SwiGLU com.microsoft.ScaledSiLU com.microsoft.RotaryEmbedding
        com.microsoft.GemmaRotaryEmbedding com.microsoft.MRotaryEmbedding com.microsoft.RelativePositionBias Affine
        ImageScaler ScaledTanh ParametricSoftplus
    """,
    # Copies, selections, fills
    Operator(Kind.MOVE): """
        Identity Cast CastLike Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Concat Split Slice Gather GatherElements
        GatherND Scatter ScatterElements ScatterND TensorScatter Pad CenterCropPad Where Compress ReverseSequence
        DepthToSpace SpaceToDepth Trilu Max Min Clip MaxPool GlobalMaxPool MaxUnpool ReduceMax ReduceMin ConstantOfShape
        EyeLike If Loop Scan Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct SequenceInsert
        SequenceMap SplitToSequence ConcatFromSequence Constant
        com.microsoft.Trilu com.microsoft.Pad com.microsoft.ExpandDims com.microsoft.GatherND com.microsoft.RemovePadding
        com.microsoft.RestorePadding com.microsoft.UnfoldTensor com.microsoft.Unique com.microsoft.DynamicSlice DynamicSlice
        Crop MemcpyFromHost MemcpyToHost
    """,
}
OPERATORS: dict[str, Operator] = {name: row for row, names in _ROWS.items() for name in names.split()}
HEAVY = frozenset(name for name, row in OPERATORS.items() if row.kind is Kind.HEAVY)
_DEFAULT = Operator(Kind.SENSITIVE)

# Operands that say how large or where, by position: shape inference reads their elements.
SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "ConstantOfShape": (0,),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "TopK": (1,),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "OneHot": (1,),
    "Loop": (0,),
    "CenterCropPad": (1,),
    "AffineGrid": (1,),
    "Col2Im": (1, 2),
    "MaxUnpool": (2,),
    "CumSum": (1,),
    "Trilu": (1,),
}


def operator(node: ir.Node) -> Operator:
    """The row of a node's operator."""
    return row(operator_name(node))


def row(name: str) -> Operator:
    """The row of an operator."""
    return OPERATORS.get(name, _DEFAULT)
