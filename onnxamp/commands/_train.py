"""What `onnxamp train` does between reading its options and the loop: model, bundle, trainer, plan."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich.console import Console
from rich.text import Text

from onnxamp.commands._configured import pairs
from onnxamp.commands._options import BATCH_SIZE
from onnxamp.commands._training_options import OPTION_NAMES, build_arguments
from onnxamp.errors import AmpError, RankLostError, UsageError
from onnxamp.model import io
from onnxamp.model.units import all_nodes
from onnxamp.policy.operators import Kind, operator
from onnxamp.trainer import distributed, export, state_dict
from onnxamp.trainer.collective import Collective, SingleProcess
from onnxamp.trainer.data import Arrays, Data, hold_out, open_data
from onnxamp.trainer.device import find_device, usable_threads
from onnxamp.trainer.drive import Plan, drive, finished
from onnxamp.trainer.fit import History
from onnxamp.trainer.inference import take_weights
from onnxamp.trainer.metrics import metric
from onnxamp.trainer.micro_batch import micro_batch
from onnxamp.trainer.run import Run
from onnxamp.trainer.trainer import Trainer
from onnxamp.training import build
from onnxamp.training.bundle import MANIFEST, Bundle


class Session:
    """One call of the command.

    Args:
        options: Parameters of the command.
        effective: What is saved as the configuration of the run.
        console: Where a person looks.
        building: Options given that say how a bundle is built.
    """

    def __init__(
        self, options: Mapping[str, Any], effective: Mapping[str, Any], console: Console, building: Sequence[str] = ()
    ) -> None:
        self.building = building
        self.options = options
        self.effective = dict(effective)
        self.run = Run(options["output"])
        self.columns = pairs(options["column"], "--column")
        self.provider_options = pairs(options["provider_option"], "--provider-option")
        if options["resume"] and not options["force"]:
            self.run.check_whole()
        self.data, self.val = self._data()
        self.collective = self._collective()
        self.console = console if self.collective.rank == 0 else Console(quiet=True)
        self.threads = usable_threads(options["threads"], self.collective.local_world_size)
        self.resumes = bool(options["resume"]) and self.run.exists and self.run.ours
        self.exported = self.run.model_path.is_file()
        self.collective.barrier()  # all have looked before the first writes

    def train(self) -> History:
        """Do it, together with the other processes if `torchrun` has started several."""
        try:
            trainer = (
                self._resumed() if self.resumes else self._fresh() if self.collective.rank == 0 else self._joined()
            )
            plan = self._plan(trainer)
            if self.resumes:
                if (history := finished(trainer, plan, exported=self.exported)) is not None:
                    has = f"{history.epochs} epoch{'s' * (history.epochs != 1)} and {history.steps} steps"
                    self._say(f"nothing left to do: the run has {has}; a larger --epochs or --steps goes further")
                    self._leave()
                    return history
                if self.collective.rank == 0:
                    self.run.write_config({**self.run.read_config(), **self.effective})
            self._introduce(trainer, plan)
            history = drive(self.run, trainer, plan, self.console)
        except BaseException as problem:
            self._leave(str(problem) if isinstance(problem, AmpError) else type(problem).__name__, problem)
            raise
        self._leave()
        return history

    def _collective(self) -> Collective:
        if not distributed.launched():
            return SingleProcess()
        device = find_device(self.options["provider"], distributed.local_rank())
        return distributed.TorchCollective("nccl" if device.memory == "cuda" else "gloo", self.options["rank_timeout"])

    def _leave(self, reason: str = "", problem: BaseException | None = None) -> None:
        if isinstance(self.collective, distributed.TorchCollective):
            self.collective.leave("" if isinstance(problem, RankLostError) else reason)

    def result(self, history: History) -> dict[str, Any]:
        """What `--json` prints."""
        result = dataclasses.asdict(history)
        del result["losses"]
        result["loss"] = history.losses[-1] if history.losses else None
        return {**result, "run": str(self.run.folder), "model": str(self.run.model_path)}

    def _data(self) -> tuple[Data, Data | None]:
        """The data to train on, and those to evaluate on."""
        if not self.options["data"] and self.options["resume"] and not self.run.exists:
            raise UsageError(
                f"There is no run in {self.run.folder} to go on with (its beginning was not finished): give MODEL, --data and the rest "
                "again."
                if self.run.ours
                else f"There is no run in {self.run.folder} to go on with: name its folder, or begin one with MODEL and --data."
            )
        if not self.options["data"]:
            raise UsageError("There is nothing to train on: give --data FILE.npz or a folder.")
        data, val, part = open_data(self.options["data"]), self.options["val"], self.options["val_split"]
        if part is None:
            return data, open_data(val) if val else None
        if val:
            raise UsageError("--val and --val-split both say what to evaluate on: give one of them.")
        assert isinstance(data, Arrays)  # as all that is opened by a path
        return hold_out(data, part, self.options["seed"])

    def _resumed(self) -> Trainer:
        bundle = Bundle.load(self.run.bundle_path)
        newest = self.run.resumable()
        provider, accumulate = self.options["provider"], self.options["accumulate"] or 1
        shared: dict[str, Any] = {
            "threads": self.threads,
            "collective": self.collective,
            "provider_options": self.provider_options,
        }
        if newest is None:
            self._say("nothing was saved yet: the run begins anew")
            trainer = Trainer(bundle, provider, accumulate, **shared)
        else:
            self._say(f"going on from {newest}")
            trainer = Trainer.load(newest, provider, bundle=bundle, **shared)
            size = trainer.regroup(self.effective.get("batch-size", BATCH_SIZE))
            if trainer.accumulate != accumulate:
                self._say(f"windows keep their rows: now {trainer.accumulate} micro-batches of {size} in each process")
            self.effective |= {"batch-size": size, "accumulate": trainer.accumulate}
        return trainer

    def _joined(self) -> Trainer:
        """What rank 0 has begun, on another rank."""
        self.collective.barrier()
        begun = self.run.read_config()
        self.effective |= {name: begun[name] for name in ("batch-size", "accumulate")}
        return Trainer(
            Bundle.load(self.run.bundle_path),
            self.options["provider"],
            begun["accumulate"],
            threads=self.threads,
            collective=self.collective,
            provider_options=self.provider_options,
        )

    def _fresh(self) -> Trainer:
        options = self.options
        if options["global_batch"] and (options["batch_size"] or options["accumulate"]):
            raise UsageError("--global-batch finds --batch-size and --accumulate itself; give one or the others.")
        bundle, names = self._bundle()
        provider = options["provider"]
        size, accumulate = options["batch_size"] or BATCH_SIZE, options["accumulate"] or 1
        if options["global_batch"]:
            size, accumulate = micro_batch(
                bundle, provider, self.data, self.columns, options["global_batch"], self.collective
            )
            each = f" in each of {self.collective.world_size} processes" if self.collective.world_size > 1 else ""
            self._say(f"window of {options['global_batch']} rows in {accumulate} micro-batches of {size}{each}")
        self.effective.pop("global-batch", None)
        self.effective |= {"batch-size": size, "accumulate": accumulate}
        trainer = Trainer(bundle, provider, accumulate, threads=self.threads, provider_options=self.provider_options)
        self._plan(trainer)  # finds mistakes in the options before anything is written
        inputs = [options[name] for name in ("model", "data", "val", "init_from", "like") if options[name]]
        self.run.create(inputs, force=options["force"] or options["resume"])
        bundle = bundle.save(self.run.bundle_path)
        trainer.bundle = bundle
        if names is not None:
            names.save(self.run.names_path)
        self.run.write_config(self.effective)
        self.collective.barrier()  # the others read what was written
        trainer.join(self.collective)
        return trainer

    def _bundle(self) -> tuple[Bundle, state_dict.Names | None]:
        options = self.options
        source = options["model"]
        if source is None and options["init_from"] is None:
            raise UsageError("There is no model: give an ONNX file, a bundle, or --init-from RUN.")
        if source is not None and (Path(source) / MANIFEST).is_file():
            if options["init_from"] or options["replace_head"] or options["like"]:
                raise UsageError(
                    "A bundle is finished: give --init-from, --replace-head or --like with the model itself."
                )
            if self.building:
                raise UsageError(
                    f"The bundle {source} has its own --{self.building[0]}: build another one for this value."
                )
            for name in OPTION_NAMES:
                if name != "seed":
                    self.effective.pop(name.replace("_", "-"), None)
            path = Path(source) / "names.json"
            return Bundle.load(source), state_dict.Names.load(path) if path.is_file() else None
        model = self._model(source)
        names = state_dict.names_of(model, options["like"]) if options["like"] else None
        if names is not None and names.absent:
            self._say(
                f"not in the model as they are (left out, or joined with others), and given back unchanged: {', '.join(names.absent)}"
            )
        if options["replace_head"]:
            from onnxamp.training.head import replace_head

            output, _, units = options["replace_head"].rpartition(":")
            if not units.isdigit() or int(units) < 1:
                raise UsageError(f"--replace-head takes [OUTPUT:]UNITS, not {options['replace_head']!r}.")
            model = replace_head(model, output or None, int(units), seed=options["seed"])
        with self.console.status("building the training graphs"):
            return build(model, **build_arguments(options, self._total_steps())), names

    def _model(self, source: str | None) -> ir.Model:
        """The model, with the parameters of another run where `--init-from` names one."""
        if self.options["init_from"] is None:
            return io.load(str(source))
        with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
            path = Path(folder) / "model.onnx"
            export.load_trained(self.options["init_from"]).export(path)
            before = io.load(path)
            if source is None:
                return before
            model = io.load(source)
            left = take_weights(model, before)
        if left:
            self._say(f"not in {self.options['init_from']}, and kept from the model: {', '.join(left)}")
        return model

    def _total_steps(self) -> int | None:
        """Updates that the run is planned to have; None if the length of the data is not known."""
        options = self.options
        steps, epochs = options["steps"], options["epochs"]
        if steps and not epochs:
            return int(steps)
        if not isinstance(self.data, Arrays):
            return int(steps) if steps else None
        rows: int = self.data.rows
        size, accumulate = options["batch_size"] or BATCH_SIZE, options["accumulate"] or 1
        window = options["global_batch"]
        whole = size * self.collective.world_size
        windows = math.ceil(rows / window) if window else math.ceil(math.ceil(rows / whole) / accumulate)
        total = windows * int(epochs or 1)
        return min(total, int(steps)) if steps else total  # the run ends with whichever comes first

    def _plan(self, trainer: Trainer) -> Plan:
        options = self.options
        plan = Plan(
            data=self.data,
            val=self.val,
            columns=self.columns,
            epochs=options["epochs"] if options["epochs"] or options["steps"] else 1,
            steps=options["steps"],
            batch_size=self.effective.get("batch-size", BATCH_SIZE),
            eval_every=options["eval_every"],
            metrics=tuple(metric(name, **trainer.metric_options) for name in options["metric"]),
            early_stop=options["early_stop"],
            patience=options["patience"],
            save_every=options["save_every"],
            keep=options["keep"],
            shuffle=options["shuffle"],
            seed=options["seed"],
            tensorboard=options["tensorboard"],
        )
        plan.check(trainer)
        return plan

    def _introduce(self, trainer: Trainer, plan: Plan) -> None:
        manifest = trainer.manifest
        numbers = trainer.bundle.summary()
        count, frozen = numbers["parameters"], numbers["frozen_parameters"]
        parameters = f"{count:,} of {count + frozen:,} parameters train" if frozen else f"{count:,} parameters"
        level = manifest.level if manifest.level == "O0" else f"{manifest.level} {manifest.dtype}"
        low, heavy = heavy_nodes(trainer.bundle.graphs["eval"])
        reached = f"  heavy nodes {low} of {heavy} in 16 bits" if manifest.level != "O0" else ""
        ranks = self.collective.world_size
        where = f"{trainer.provider}, {ranks} processes" if ranks > 1 else trainer.provider
        self._say(f"{parameters}  {level}{reached}  on {where}")
        for note in (*manifest.notes, *plan.notes(trainer)):
            self._say(f"note: {note}")

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)


def heavy_nodes(graph: ir.Model) -> tuple[int, int]:
    """How many heavy nodes of the forward model compute in 16 bits, and how many there are."""
    kinds = [
        node.metadata_props.get("onnxamp.precision")
        for node in all_nodes(graph.graph)
        if operator(node).kind is Kind.HEAVY
    ]
    return sum(kind in ("fp16", "bf16") for kind in kinds), len(kinds)
