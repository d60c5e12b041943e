"""Sizes: how large a model, how many steps, how often a save, and when faults may strike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The size of a run.

    Args:
        name: In records.
        ranks: Processes; eight, as in the paper (section V-D).
        steps: Of training.
        warm_up: Steps at the beginning whose times are left out.
        interval: Steps from one periodic save to the next.
        batch: Images for each share of the data and step.
        features_batch: Likewise vectors, of the MLP stack.
        learning_rate: Of SGD with momentum 0.9.
        image: Height and width of the ResNet's images, pixels.
        channels: Of the ResNet's stages.
        blocks: Residual blocks of each stage.
        layers: Blocks of the MLP stack.
        tensor_layers: Of the stack that is cut along its inner features, where each block costs two all-reduces.
        width: Features between the blocks; inside they are four times as many.
        micro_batches: Into which a pipeline divides its batch.
        fault_steps: First and last step at which the first fault may strike.
        spacing: Steps from one fault of a cascade to the next.
        offset_s: How far into its step a fault strikes at the most, seconds.
        warning_s: From a warning to its fault, seconds (the paper's lead time is 2.0 s, section VII-C).
        detect_timeout_s: What process groups wait for a silent peer, seconds.
        answer_s: How long the coordinator waits for a process to answer before it counts as hung, seconds.
        deadline_s: After this a run has failed, seconds.
    """

    name: str
    ranks: int = 8
    steps: int
    warm_up: int
    interval: int
    batch: int
    features_batch: int
    learning_rate: float = 0.05
    image: int
    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    layers: int
    tensor_layers: int
    width: int
    micro_batches: int
    fault_steps: tuple[int, int]
    spacing: int
    offset_s: float
    warning_s: float
    detect_timeout_s: float
    answer_s: float
    deadline_s: float

    def __post_init__(self) -> None:
        last = self.fault_steps[1] + 2 * self.spacing
        if last >= self.steps:
            raise ValueError(
                f"the last fault of a cascade would strike at step {last}, after the end at {self.steps} steps"
            )
        if self.layers < self.ranks:
            raise ValueError(f"layers={self.layers} must be at least ranks={self.ranks}: each pipeline stage needs one")


_ALL = (
    Preset(
        name="tiny",
        steps=36,
        warm_up=3,
        interval=5,
        batch=4,
        features_batch=16,
        image=8,
        channels=(32, 64),
        blocks=(1, 1),
        layers=8,
        tensor_layers=2,
        width=48,
        micro_batches=4,
        fault_steps=(8, 13),
        spacing=8,
        offset_s=0.003,
        warning_s=0.5,
        detect_timeout_s=4.0,
        answer_s=3.0,
        deadline_s=90.0,
    ),
    Preset(
        name="cpu",
        steps=150,
        warm_up=10,
        interval=20,
        batch=8,
        features_batch=64,
        image=16,
        channels=(32, 64, 128),
        blocks=(1, 1, 1),
        layers=8,
        tensor_layers=4,
        width=256,
        micro_batches=8,
        fault_steps=(50, 70),
        spacing=30,
        offset_s=0.02,
        warning_s=1.0,
        detect_timeout_s=10.0,
        answer_s=4.0,
        deadline_s=600.0,
    ),
    Preset(
        name="paper",
        steps=2000,
        warm_up=50,
        interval=100,
        batch=32,
        features_batch=256,
        image=224,
        channels=(256, 512, 1024, 2048),
        blocks=(3, 4, 6, 3),
        layers=16,
        tensor_layers=16,
        width=4608,
        micro_batches=8,
        fault_steps=(270, 1070),
        spacing=270,
        offset_s=0.1,
        warning_s=2.0,
        detect_timeout_s=600.0,
        answer_s=30.0,
        deadline_s=14400.0,
    ),
)
PRESETS = {one.name: one for one in _ALL}


def preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        ValueError: if there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} must be one of {', '.join(PRESETS)}")
    return PRESETS[name]
