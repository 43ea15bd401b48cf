"""The graphs of a training step, opened on a device."""

from __future__ import annotations

import dataclasses

from onnxamp.ort.session import SessionConfig
from onnxamp.trainer.arenas import Arenas
from onnxamp.trainer.device import Device
from onnxamp.trainer.gradient import Gradient
from onnxamp.trainer.program import Place, Program, Results, segment_scalars
from onnxamp.trainer.update import Update
from onnxamp.training.bundle import Bundle
from onnxamp.training.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """What runs in a step.

    Attributes:
        grad: Adds the gradients of a micro-batch.
        reduce: Ends a window.
        update: Changes the parameters.
    """

    grad: Gradient
    reduce: Program
    update: Update

    def refusals(self, manifest: Manifest, alone: bool) -> dict[str, str]:
        """Outputs that the bundle lets overwrite their input but this runtime does not, each with the reason.

        Args:
            manifest: The bundle's.
            alone: Windows have one micro-batch.
        """
        grad = self.grad.program(alone).refusals
        parts = {"grad": grad, "reduce": self.reduce.refusals, "update": self.update.refusals}
        aliased = {
            f"{name}: {port.name}" for name, graph in manifest.graphs.items() for port in graph.outputs if port.alias
        }
        found = {f"{name}: {output}": why for name, part in parts.items() for output, why in part.items()}
        return {output: why for output, why in found.items() if output in aliased}


def open_step(
    bundle: Bundle, device: Device, arenas: Arenas, config: SessionConfig, in_place: bool, threads: int
) -> StepPrograms:
    """The programs of a bundle.

    Args:
        bundle: The bundle.
        device: Where they run.
        arenas: The state, on that device.
        config: How sessions are made.
        in_place: Overwrite state where that is proved safe.
        threads: Threads of the CPU for the update; 0 for one per processor.
    """
    ports = bundle.manifest.graphs
    results = Results(device.memory, device.id)
    segments = segment_scalars(bundle.manifest, device.memory, device.id)
    place = Place(arenas, results, config, in_place, segments)
    # Where the state is the host's, its own kernels are the best for what is left, and compilers have nothing to fuse.
    ending = Place(arenas, results, config.on_cpu(), in_place) if device.memory == "cpu" else place
    return StepPrograms(
        Gradient(device.graph(bundle, "grad"), ports["grad"], place),
        Program(device.graph(bundle, "reduce"), ports["reduce"], ending),
        Update(device.graph(bundle, "update"), ports["update"], place, threads),
    )
