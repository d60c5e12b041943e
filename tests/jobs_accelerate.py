"""What the ranks of Accelerate's tests do: plain loops, with faults, whose end state is digested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator, utils
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from jobs import Samples
from jobs_fabric import Net
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_plugin import AccelPactPlugin
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan, FaultPoint


class Prepared:
    """An accelerator with model, optimizer, loader and schedule."""

    def __init__(
        self,
        faults: list[Fault] | None = None,
        *,
        accumulate: int = 2,
        dataset: Dataset | None = None,
        accelerator: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
        normalized: bool = True,
        **plugin: Any,
    ) -> None:
        options = {"faults": FaultPlan(faults or ()), "goodput": False, "collective_timeout": 30.0,
                   "repair_budget": 60.0, **plugin}  # fmt: skip
        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulate,
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                cpu_ram_efficient_loading=False,
            ),
            kwargs_handlers=[AccelPactPlugin(**options)],
            dataloader_config=DataLoaderConfiguration(**(loader or {})),
            **(accelerator or {}),
        )
        set_seed(11)
        model = Net()
        for block in model.blocks if not normalized else ():
            block.norm = nn.Identity()  # BatchNorm on CPUs does not mix precisions
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
        batches = DataLoader(dataset or Samples(), batch_size=4, shuffle=not isinstance(dataset, IterableDataset))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, batches, schedule
        )

    @property
    def run(self) -> Any:
        return self.accelerator.accelpact

    def result(self, **more: Any) -> dict[str, Any]:
        """Where this rank ended."""
        self.accelerator.end_training()
        return {
            "digest": state_digest(self.model, [self.optimizer.optimizer]),
            "updates": self.run.committed_updates,
            "rate": self.optimizer.param_groups[0]["lr"],
            "step_count": self.schedule.scheduler._step_count,
            "mean": repr(self.model.mean.compute().item()),  # perhaps nan, which is not itself
            "calls": self.model.calls,
            "outputs": self.model.outputs,
            "pending": [str(fault) for fault in self.run.pending_faults],
            "incidents": [incident.to_dict() for incident in self.run.incidents],
            **more,
        }


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """One of the jobs below, by its name."""
    return globals()[name](*args, **options)


def drop_in(run: Any, fault: Fault | None) -> None:
    """Let a fault strike here, on its rank; for places that have no fault point."""
    if fault is not None and fault.rank == torch.distributed.get_rank():
        run.runtime.machine.faults.strike(fault)


def train(faults: list[Fault] | None = None, *, updates: int = 5, **options: Any) -> dict[str, Any]:
    """The standard idiom."""
    prepared = Prepared(faults, **options)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    done, epochs = 0, 0
    losses: list[float] = []
    while done < updates:
        epochs += 1
        model.train()
        for inputs, targets in prepared.loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                model.mean.update(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                prepared.schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if done == updates:
                break
    return prepared.result(losses=losses, epochs=epochs)


def backward_all(prepared: Prepared, window: list[Any]) -> torch.Tensor:
    """The forward and backward passes of an update, by hand."""
    accelerator, model = prepared.accelerator, prepared.model
    total = torch.zeros(())
    for index, (inputs, targets) in enumerate(window):
        with accelerator.no_sync(model) if index < len(window) - 1 else nullcontext():
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
        model.mean.update(loss.detach())
        total += loss.detach()
    return total


def windows(prepared: Prepared, accumulate: int) -> Iterator[list[Any]]:
    """The batches of one update after the other."""
    batches = iter(prepared.loader)
    while len(window := list(islice(batches, accumulate))) == accumulate:
        yield window


def by_function(
    faults: list[Fault] | None = None, *, accumulate: int = 2, protected: bool = True, **options: Any
) -> dict[str, Any]:
    """A loop without ``accumulate``: each update is a function, or nothing says what it is."""
    prepared = Prepared(faults, accumulate=accumulate, **options)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer

    def update(window: list[Any]) -> float:
        total = backward_all(prepared, window)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return total.item()

    step = prepared.run.resilient_update(update) if protected else update
    losses = []
    for _, window in zip(range(5), windows(prepared, accumulate), strict=False):
        losses.append(step(window))
        prepared.schedule.step()
        optimizer.zero_grad()
    return prepared.result(losses=losses)


def after_the_context(faults: list[Fault] | None = None, **options: Any) -> dict[str, Any]:
    """A loop that steps after the context, reduces in every iteration, and evaluates in between."""
    prepared = Prepared(faults, **options)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    losses, done, iterations = [], 0, 0
    scores: list[float] = []
    for inputs, targets in prepared.loader:
        iterations += 1
        loss = torch.zeros(())
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
        everybodys = accelerator.gather(loss.detach())
        optimizer.step()
        prepared.schedule.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            losses.append(everybodys.tolist())
            scores.append(evaluate(prepared))
        if done == 5:
            break
    everybodys_iterations = accelerator.gather(torch.tensor(iterations)).tolist()
    return prepared.result(losses=losses, scores=scores, iterations=everybodys_iterations)


def counting_iterations(faults: list[Fault] | None = None) -> dict[str, Any]:
    """A loop that ends after a number of iterations, which it should not."""
    prepared = Prepared(faults)
    for inputs, targets in islice(prepared.loader, 6):
        with prepared.accelerator.accumulate(prepared.model):
            prepared.accelerator.backward(nn.functional.mse_loss(prepared.model(inputs), targets))
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
    return prepared.result()


def evaluate(prepared: Prepared) -> float:
    """A step of an evaluation, which draws random numbers."""
    model = prepared.model
    model.eval()
    batch = prepared.accelerator.prepare(DataLoader(Samples(16), batch_size=4))
    with torch.no_grad():
        score = sum(
            prepared.run.run(lambda x, y: nn.functional.mse_loss(model(x), y) + torch.rand(()), *pair) for pair in batch
        )
    model.train()
    return prepared.accelerator.gather_for_metrics(score).mean().item()


class Stream(IterableDataset):
    """Samples that only the main process reads."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = Samples()
        return (samples[index] for index in range(len(samples)))


def dispatched(faults: list[Fault] | None = None, **options: Any) -> dict[str, Any]:
    """The standard idiom over batches that the main process reads and hands to the others."""
    return train(faults, dataset=Stream(), loader={"dispatch_batches": True}, **options)


OPERATIONS: dict[str, Callable[[Accelerator, torch.Tensor], Any]] = {
    "gather": lambda accelerator, mine: accelerator.gather(mine).tolist(),
    "gather_for_metrics": lambda accelerator, mine: accelerator.gather_for_metrics(mine).tolist(),
    "gather_object": lambda accelerator, mine: utils.gather_object([mine.tolist()]),
    "reduce": lambda accelerator, mine: accelerator.reduce(mine, "mean").tolist(),
    "broadcast": lambda accelerator, mine: utils.broadcast(mine.clone(), from_process=1).tolist(),
    "broadcast_object_list": lambda accelerator, mine: utils.broadcast_object_list([mine.tolist()], from_process=2),
    "pad_across_processes": lambda accelerator, mine: accelerator.pad_across_processes(
        torch.ones(accelerator.process_index + 1)
    ).tolist(),
    "wait_for_everyone": lambda accelerator, mine: accelerator.wait_for_everyone(),
    "check_trigger": lambda accelerator, mine: accelerator.check_trigger(),
}


def operations(victim: int | None = None) -> dict[str, Any]:
    """Updates with one of Accelerate's own collectives after each, in which a link of the victim's is cut."""
    prepared = Prepared(accumulate=1)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    values = {}
    for (name, operation), (inputs, targets) in zip(OPERATIONS.items(), prepared.loader, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        fault = None if victim is None else Fault(point=FaultPoint.BOUNDARY, update=0, rank=victim)
        with striking(prepared.run, fault):
            values[name] = operation(accelerator, torch.tensor([float(len(values)), accelerator.process_index]))
    return prepared.result(values=values)


@contextmanager
def striking(run: Any, fault: Fault | None) -> Iterator[None]:
    """A fault strikes in the next operation outside of an update, right before its work."""
    if fault is None:
        yield
        return
    operations = run.runtime.operations
    plain = operations.run

    def struck_run(operation: Callable[[], Any], **options: Any) -> Any:
        vars(operations).pop("run", None)  # once

        def struck() -> Any:
            nonlocal fault
            now, fault = fault, None
            drop_in(run, now)
            return operation()

        return plain(struck, **options)

    operations.run = struck_run
    yield
    assert "run" not in vars(operations), "no operation has come"


def checkpoints(folder: str, save: Fault | None = None, load: Fault | None = None) -> dict[str, Any]:
    """Train, save, train, load, and train the same again; faults in saving and loading."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    # Each rank's running statistics are its own, but there is one copy of them in a checkpoint
    prepared = Prepared(accelerator={"project_config": project}, normalized=False)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    digests = []
    batches = list(islice(prepared.loader, 4))

    def some_updates() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                prepared.schedule.step()
                optimizer.zero_grad()
        digests.append(state_digest(model, [optimizer.optimizer]))

    some_updates()
    with striking(prepared.run, save):
        accelerator.save_state()
    rng, calls, outputs = torch.get_rng_state(), model.calls, list(model.outputs)
    some_updates()
    with striking(prepared.run, load):
        accelerator.load_state()
    torch.set_rng_state(rng)
    model.calls, model.outputs = calls, outputs
    some_updates()
    return prepared.result(digests=digests)


class Notes(GeneralTracker):
    """A tracker that remembers."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append({**values, "step": step})

    def finish(self) -> None:
        self.finished = True


def reported(faults: list[Fault] | None = None) -> dict[str, Any]:
    """A run with account and tracker; also its loop is wrapped for uneven inputs, which FSDP has no use for."""
    notes = Notes()
    prepared = Prepared(faults, goodput=True, accelerator={"log_with": notes})
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    accelerator.init_trackers("test")
    with accelerator.join_uneven_inputs([model]):
        for inputs, targets in prepared.loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if prepared.run.committed_updates == 4:
                break
    accelerator.log(prepared.run.goodput_metrics(), step=0)
    result = prepared.result()
    return {**result, "logged": notes.logged, "finished": notes.finished, "summary": prepared.run.summary.to_dict()}


def uneven() -> str:
    """Loaders that would leave ranks waiting are refused."""
    prepared = Prepared(loader={"even_batches": False})  # 128 batches for 4 ranks
    try:
        iter(prepared.accelerator.prepare(DataLoader(Samples(12), batch_size=4)))
    except ValueError as error:
        return str(error)
    return ""
