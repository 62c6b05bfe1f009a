"""Configuration of a training run: one TOML file and `key=value` overrides, validated once.

    [train]
    steps = 600            on the command line: train.steps=600

An unknown key or a value that does not fit raises ConfigError, which names the key, its place and the nearest
known key. From here on configuration flows down as values.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from hpcpar.autograd import Recompute
from hpcpar.comm import select
from hpcpar.context_parallel import Method
from hpcpar.errors import ConfigError
from hpcpar.models import LlamaConfig
from hpcpar.planner.experts import BalanceOver, Drop, Score
from hpcpar.planner.memory import MOMENTS
from hpcpar.planner.shapes import QueryKeyNorm
from hpcpar.training.usual_names import OF_OTHERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _require_a_name(value: Any) -> Any:
    # pathlib would take it for the current directory; it comes from key=$VARIABLE without a value.
    if isinstance(value, str) and not value.strip():
        raise ValueError("the name of a file or directory is empty; give one, or leave the key out")
    return value


def _require_text_or_false(value: Any) -> Any:
    # pydantic would take 0, which may be meant as the number of a token, for false.
    if value is not False and not (isinstance(value, str) and value):
        raise ValueError("give the token's text, in quotes, or false where documents are to run together")
    return value


Named = Annotated[Path, BeforeValidator(_require_a_name)]
Beta = Annotated[float, Field(ge=0, lt=1)]

BYTE_MIB = 2.0**-20


class Section(BaseModel):
    """A table of the file: only its own keys, and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take it for 1, as in recompute_layers = true; false is the usual word for none.
        if value is True and "bool" not in str(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("this key is not one of those that are true or false")
        return value


class ExpertsSection(Section):
    """Changes to the preset's experts, or experts for a model without them. Fields as in `Experts`."""

    model_config = ConfigDict(allow_inf_nan=True)  # Experts refuses them, and says what to do

    count: int | None = None
    per_token: int | None = None
    ffn_size: int | None = None
    shared_ffn_size: int | None = None
    first_dense: int | None = None
    score: Score | None = None
    renormalise: bool | None = None
    scale: float | None = None
    groups: int | None = None
    groups_per_token: int | None = None
    capacity_factor: float | None = None
    drop: Drop | None = None
    balance_loss: float | None = None
    balance_over: BalanceOver | None = None
    z_loss: float | None = None
    bias_rate: float | None = None


class ModelSection(Section):
    """A preset and changes to it, or a model of Hugging Face. Fields as in `LlamaConfig`.

    preset         name of the sizes that the keys below change
    hugging_face   its directory, in place of the preset: sizes, tokenizer and initial values are its files'
    vocab_size     None = the tokenizer's
    max_sequence   None = train.sequence
    seed           of the initial values
    """

    preset: str = "tiny"
    hugging_face: Named | None = None
    vocab_size: int | None = Field(default=None, gt=0)
    hidden_size: int | None = Field(default=None, gt=0)
    layers: int | None = Field(default=None, gt=0)
    heads: int | None = Field(default=None, gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    head_size: int | None = Field(default=None, gt=0)
    ffn_size: int | None = Field(default=None, gt=0)
    max_sequence: int | None = Field(default=None, gt=0)
    rope_theta: float | None = Field(default=None, gt=0)
    norm_epsilon: float | None = Field(default=None, gt=0)
    tie_embeddings: bool | None = None
    initial_std: float | None = Field(default=None, ge=0)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    qk_norm: QueryKeyNorm | None = None
    experts: ExpertsSection = ExpertsSection()
    seed: int = 0

    def __str__(self) -> str:
        """Name where the sizes come from: model.preset = 'tiny'."""
        if self.hugging_face is not None:
            return f"model.hugging_face = {str(self.hugging_face)!r}"
        return f"model.preset = {self.preset!r}"


class DataSection(Section):
    """Text and its tokenizer.

    paths       files of text, JSONL or Parquet, or directories of them; empty = Python's own standard library
    text_key    the field of JSONL's and Parquet's records that is their text
    tokenizer   a Hugging Face `tokenizers` JSON file; None = bytes
    eos_token   the token of such a file that ends a document; None = the one named by the files beside it, or
                one of the usual names; false = none, documents run together
    pack_documents   no document sees another in attention: packed rows are as if each were read by itself
    held_out    share of the documents that is kept out of training for the held-out loss
    max_mib     limit on the standard library's text; paths are read whole
    block       tokens of text that stay together in the order of training; None = train.sequence. With a
                multiple of it a run can go on with longer sequences amid an epoch
    cache       directory for the tokens, built once for the same files and tokenizer
    """

    paths: tuple[Named, ...] = ()
    text_key: str = Field(default="text", min_length=1)
    tokenizer: Named | None = None
    eos_token: Annotated[str | Literal[False], BeforeValidator(_require_text_or_false)] | None = None
    pack_documents: bool = False
    held_out: float = Field(default=0.05, gt=0, lt=1)
    max_mib: float = Field(default=8.0, gt=0)
    block: int | None = Field(default=None, gt=0)
    cache: Named = Path("runs/cache")

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path_is_enough(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class TrainSection(Section):
    """Length of training, and sizes of its batches.

    steps              of the optimizer, which the schedule of the learning rate spans
    until              steps after which this run ends, to be gone on from by --resume; None = all
    sequence           tokens in a sequence
    global_batch       sequences in an optimizer step, over all ranks
    microbatch         sequences that a rank computes at once; the rest is accumulated
    seed               of the order of the data, of dropout and of the process's random numbers
    device             "cuda": each rank takes a GPU
    threads            of torch on each rank; None = the rank's share of its node's cores
    evaluate_every     steps between held-out losses; 0 = at the end only
    compare_every      steps between comparisons of what replicas hold, bit for bit; 0 = never
    held_out_batches   global batches of held-out text in one such loss
    device             "cuda" gives each rank the GPU of its place on its node
    precision          type of parameters and gradients; with bfloat16 and float16 the optimizer keeps float32
                       master weights, and float16 scales its loss
    recompute          activations that backward recomputes: "selective" the attention core, "full" each layer
                       from its input
    recompute_layers   number of layers that recompute, from the first on; None = all
    preemptible        SIGUSR1 and SIGTERM ask for a checkpoint after the step, and for exit status 75; Ctrl-C
                       always asks for one, with status 130
    """

    steps: int = Field(default=500, gt=0)
    until: int | None = Field(default=None, gt=0)
    sequence: int = Field(default=256, gt=0)
    global_batch: int = Field(default=16, gt=0)
    microbatch: int = Field(default=8, gt=0)
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    threads: int | None = Field(default=None, gt=0)
    evaluate_every: int = Field(default=100, ge=0)
    compare_every: int = Field(default=0, ge=0)
    held_out_batches: int = Field(default=8, gt=0)
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = Field(default=None, ge=0)
    preemptible: bool = True

    @field_validator("until")
    @classmethod
    def _is_within_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        steps = info.data.get("steps")
        if value is not None and steps is not None and value > steps:
            raise ValueError(f"there are train.steps = {steps}; give at most that")
        return value

    @property
    def last_step(self) -> int:
        """Steps done when this run ends."""
        return self.until or self.steps


class OptimizerSection(Section):
    """The optimizer, and how its gradients are reduced.

    name           muon steps on the layers' matrices (torch.optim.Muon, with Nesterov's momentum), and AdamW
                   on embeddings, the output projection and vectors
    learning_rate  the highest, after warm-up
    betas          decay of AdamW's two moments from step to step
    epsilon        what AdamW adds to the root of its second moment
    adam_learning_rate   of what AdamW steps on with name = "muon"; None = learning_rate
    momentum       of sgd; muon's is muon_momentum
    muon_momentum  of muon
    muon_scale     of muon's updates: match_rms_adamw makes them as large as AdamW's, so that its learning
                   rate and weight decay fit (arXiv 2502.16982); original is Jordan's, for rates as 0.02
    clip_norm      largest norm of the whole gradient; 0 = no clipping
    skip_limit     steps in a row whose gradients are NaN or infinite, after which the run ends. All ranks
                   leave such steps out
    weight_decay   of matrices; vectors (the norms) are never decayed
    bucket_mib     gradients reduced together, None = the stage's default; the first bucket is smaller, to
                   start sooner
    first_bucket_mib   gradients reduced in the first bucket
    zero_stage     shards 1 optimizer state, 2 gradients too, 3 parameters too
    algorithm      of the gradients' all-reduce, or from stage 1 on reduce-scatter (ring, …); None = by size
    offload        a directory for the optimizer's state, or "cpu" for host memory; None = with the parameters
    reduction      type in which gradients are summed over ranks; None = their own
    moments        type of the optimizer's moments; None = float32
    shared_parameters   the ranks of a node share the parameters' memory
    prefetch       layers that stage 3 gathers ahead
    reshard        of stage 3: free a layer's gathered parameters after its forward and backward, for each
                   microbatch again ("unit"), or keep them all until the optimizer steps ("step")
    """

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    learning_rate: float = Field(default=3e-3, gt=0)
    adam_learning_rate: float | None = Field(default=None, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, ge=0)
    skip_limit: int = Field(default=10, ge=1)
    bucket_mib: float | None = Field(default=None, ge=BYTE_MIB)
    first_bucket_mib: float = Field(default=1.0, ge=BYTE_MIB)
    zero_stage: Literal[0, 1, 2, 3] = 0
    algorithm: str | None = None
    offload: Annotated[str, BeforeValidator(_require_a_name)] | None = None
    reduction: Literal["float32"] | None = None
    moments: Literal["bfloat16"] | None = None
    shared_parameters: bool = False
    prefetch: int = Field(default=1, ge=0)
    reshard: Literal["unit", "step"] = "unit"

    @field_validator("adam_learning_rate", "momentum", "muon_momentum", "muon_scale")
    @classmethod
    def _is_of_the_optimizer(cls, value: Any, info: ValidationInfo) -> Any:
        of = "sgd" if info.field_name == "momentum" else "muon"
        is_default = value == cls.model_fields[str(info.field_name)].default
        if not is_default and info.data.get("name", of) != of:
            raise ValueError(f"is of {of}, and optimizer.name is another; set optimizer.name={of}, too")
        return value

    @field_validator("algorithm")
    @classmethod
    def _is_an_algorithm(cls, value: str | None, info: ValidationInfo) -> str | None:
        collectives = {0: ["allreduce"], 3: ["allreduce", "reduce_scatter"]}
        asked = collectives.get(info.data.get("zero_stage", 3), ["reduce_scatter"])
        known = {name: None for collective in asked for name in select.names(collective)}
        if value is not None and value not in known:
            raise ValueError(f"for {' and '.join(asked)} there are {', '.join(known)}")
        return value

    @field_validator("shared_parameters")
    @classmethod
    def _is_about_shards(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("zero_stage") == 0:
            raise ValueError("without ZeRO each rank updates all parameters; set optimizer.zero_stage=1, too")
        if value and info.data.get("name") == "muon":
            raise ValueError("muon's ranks own matrices of different sizes; leave it out, or use adamw")
        return value

    @property
    def moment_counts(self) -> tuple[int, int]:
        """Moments per parameter of the layers' matrices, and of all others."""
        return MOMENTS[self.name] if self.name != "sgd" or self.momentum else (0, 0)

    def rate_of(self, optimizer: str) -> float:
        """Return the highest learning rate of what an optimizer of this class steps on."""
        adam = self.name == "muon" and optimizer == "AdamW"
        return self.adam_learning_rate if adam and self.adam_learning_rate else self.learning_rate


class ScheduleSection(Section):
    """The learning rate over time: linear warm-up, then cosine decay.

    warmup_fraction   of the steps, until the full learning rate
    final_fraction    of the learning rate, at the last step
    """

    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    final_fraction: float = Field(default=0.1, ge=0, le=1)


class MeshSection(Section):
    """Degrees of parallelism; -1 = whatever the number of ranks leaves.

    pp   pipeline: ranks that hold different layers
    dp   data: ranks that see different sequences
    cp   context: ranks that share each sequence
    tp   tensor: ranks that share each layer
    ep   expert: ranks that divide the experts, folded out of dp × cp × tp / etp
    etp  ranks that each expert is split over: 1, or as tp
    dp_shard   dp ranks that share a set of ZeRO's shards, as those of a node; shards of gradients are
               averaged over the other sets (HSDP). -1 = all of dp
    """

    pp: int = 1
    dp: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    dp_shard: int = -1


class PipelineSection(Section):
    """The pipeline's schedule, and the layers of its stages.

    schedule          a name (`hpcpar draw pipeline` lists them), or a file: rows as in `0F0 0F1 0B0`, or
                      torch's CSV
    stages_per_rank   None = the schedule's default
    memory_limit      chunks (a microbatch's activations of one stage) that a rank may keep, for schedules
                      with a limit; None = the schedule's own
    balance           assigns layers to stages by "flops"; by times "measured" at the start; or by number for
                      each stage, as in [3, 3, 4, 2]
    """

    schedule: str = "1f1b"
    stages_per_rank: int | None = Field(default=None, gt=0)
    memory_limit: int | None = Field(default=None, gt=0)
    balance: Literal["flops", "measured"] | tuple[int, ...] = "flops"

    @field_validator("balance", mode="before")
    @classmethod
    def _is_a_way_or_numbers(cls, value: Any) -> Any:
        if value in ("flops", "measured"):
            return value
        if isinstance(value, (list, tuple)) and all(type(each) is int and each >= 0 for each in value):
            return tuple(value)
        raise ValueError("give 'flops', 'measured', or the layers of each stage, as in [3, 3]")


class TensorParallelSection(Section):
    """Communication between the ranks of a layer. Fields as in `TensorParallel`.

    sequence_parallel   between the parallel layers each rank has its part of the sequence
    overlap             in backward, reduce inputs' gradients while weights' gradients are computed
    gather_again        with sequence_parallel: gather inputs again in backward instead of keeping them
    chunks              with sequence_parallel: number of parts that overlap with matrix products
    """

    sequence_parallel: bool = False
    overlap: bool = True
    gather_again: bool = False
    chunks: int = Field(default=1, gt=0)

    @field_validator("gather_again", "chunks")
    @classmethod
    def _is_about_sequence_parallelism(cls, value: int, info: ValidationInfo) -> int:
        is_default = value == cls.model_fields[str(info.field_name)].default
        if not is_default and not info.data.get("sequence_parallel", True):
            raise ValueError(
                "this is about sequence parallelism; set tensor_parallel.sequence_parallel=true, too"
            )
        return value


class ContextParallelSection(Section):
    """Attention of ranks that share each sequence. Fields as in `ContextParallel`.

    method   "exchange" sends the keys that the mask needs, "ring" and "allgather" all of them; "ulysses"
             exchanges heads; "ulysses+exchange" and "ulysses+ring" do so within a node
    inner    for the last two: neighbouring ranks that exchange heads; None = those of a node
    keep     keep other ranks' keys for backward: fewer bytes, more memory
    narrow   gradients of keys travel in the type of the activations, not in float32
    """

    method: Method = "exchange"
    inner: int | None = Field(default=None, gt=0)
    keep: bool = False
    narrow: bool = False


class ExpertParallelSection(Section):
    """Exchange of tokens between ranks that divide the experts. Fields as in `ExpertParallel`.

    stages        1: straight to the expert; 2: to each node once; "auto"
    halves        the second half of the tokens travels while experts compute the first
    sum_on_node   in two stages, sum outputs of a node's experts there
    """

    stages: Literal["auto", 1, 2] = "auto"
    halves: bool = False
    sum_on_node: bool = False


class OutputSection(Section):
    """Files of a run, and when they are written.

    directory         run.json, metrics.jsonl, loss.png, summary.json, timeline.json, pipeline.json and
                      checkpoints/
    log_every         steps between lines of progress; losses are summed over ranks as often
    checkpoint_every  steps between checkpoints; 0 = by time, and at the end
    checkpoint_minutes  longest time between checkpoints, checked every log_every steps; 0 = no limit
    keep              checkpoints to keep; the newest one that is whole and finite always stays
    save_async        copy the state into host memory, and write it while training goes on
    timeline_steps    first steps of the run to trace into timeline.json; 0 = no timeline
    sinks             trackers that get the lines of metrics.jsonl too; each needs the package of its name
    sample_tokens     of text that the trained model writes at the end, after held-out text; 0 = none
    """

    directory: Named = Path("runs/latest")
    log_every: int = Field(default=10, gt=0)
    checkpoint_every: int = Field(default=0, ge=0)
    checkpoint_minutes: float = Field(default=30.0, ge=0)
    keep: int = Field(default=2, gt=0)
    save_async: bool = False
    timeline_steps: int = Field(default=0, ge=0)
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    sample_tokens: int = Field(default=0, ge=0)

    @field_validator("sinks", mode="before")
    @classmethod
    def _one_sink_is_enough(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Config(Section):
    """A whole training run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    mesh: MeshSection = MeshSection()
    tensor_parallel: TensorParallelSection = TensorParallelSection()
    context_parallel: ContextParallelSection = ContextParallelSection()
    expert_parallel: ExpertParallelSection = ExpertParallelSection()
    pipeline: PipelineSection = PipelineSection()
    output: OutputSection = OutputSection()

    def model_config_for(self, vocabulary: int) -> LlamaConfig:
        """Return the model's sizes for tokens 0 … vocabulary - 1."""
        named = self.model.model_dump(exclude={"preset", "hugging_face", "seed"}, exclude_none=True)
        if not named["experts"]:
            del named["experts"]
        config = LlamaConfig.preset(
            self.model.preset, **({"vocab_size": vocabulary, "max_sequence": self.train.sequence} | named)
        )
        if config.vocab_size < vocabulary:
            raise ConfigError(
                f"model.vocab_size = {config.vocab_size}, but the tokenizer makes {vocabulary} different "
                f"tokens; leave model.vocab_size out, or make it at least that"
            )
        if config.max_sequence < self.train.sequence:
            advice = "leave model.max_sequence out, or raise it"
            if self.model.hugging_face is not None:
                advice = f"set model.max_sequence={self.train.sequence} to go beyond what its files say"
            raise ConfigError(
                f"train.sequence = {self.train.sequence} is longer than model.max_sequence = "
                f"{config.max_sequence}; {advice}"
            )
        if (self.train.recompute_layers or 0) > config.layers:
            raise ConfigError(
                f"train.recompute_layers = {self.train.recompute_layers}, but the model has {config.layers} "
                f"layers; leave it out for all of them, or lower it"
            )
        return config

    @property
    def recompute(self) -> Recompute:
        return Recompute(self.train.recompute, self.train.recompute_layers)


def parse(text: str, *, source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a file's text and the overrides; `source` names the file in errors."""
    return config_of(read_table(text, source), source=source, overrides=overrides)


def read_table(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a file's text."""
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not a TOML file: {error}") from error
    return found


def config_of(table: dict[str, Any], *, source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a file's tables and the overrides, which are written into them."""
    if "stage" in table:
        raise ConfigError(f"{source} has stages: give it to `hpcpar train`, or to parse_stages and runs")
    origins: dict[str, str] = {}
    for override in overrides:
        origins[write_override(table, override)] = f"override {override!r}"
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        complaints = [_complaint(dict(fault), source, origins) for fault in error.errors()]
        raise ConfigError("\n".join(complaints)) from None


def model_config_saved(saved: Mapping[str, Any]) -> LlamaConfig | None:
    """Return a checkpoint's model, vocabulary aside; None if its configuration does not describe one."""
    try:
        told = {"model": saved["model"], "train": {"sequence": saved["train"]["sequence"]}}
        return Config.model_validate(told).model_config_for(1)
    except (KeyError, ValidationError, ConfigError):
        return None


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Parse a configuration file."""
    return parse(read_text(path), source=str(path), overrides=overrides)


def read_text(path: Path) -> str:
    """Return the text of a configuration file; ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> tuple[str, ...]:
    """Return every key that a file may set, with its table: ("model.preset", …)."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if is_table(field.annotation):
            assert isinstance(field.annotation, type)
            keys += known_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return tuple(keys)


def is_table(kind: Any) -> bool:
    """True for the type of a table within the file, False for that of a value."""
    # Python 3.10 takes list[str] for a type, for which issubclass fails.
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


def write_override(table: dict[str, Any], override: str) -> str:
    """Write `a.b=value` into the nested table; return the key."""
    key, equals, value = override.partition("=")
    key = key.strip()
    *sections, leaf = key.split(".")
    if not equals or not all((*sections, leaf)):
        raise ConfigError(f"override {override!r} is not key=value, as in train.steps=100")
    for name in sections:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name} is a value, not a table")
        table = inner
    table[leaf] = _value(value.strip())
    return key


def _value(text: str) -> Any:
    """Parse a TOML value (3, 1e-3, true, "x", ["a", "b"]); return other text as it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _complaint(fault: Mapping[str, Any], source: str, origins: Mapping[str, str]) -> str:
    """Describe one of pydantic's faults in a line."""
    key = ".".join(str(part) for part in fault["loc"])
    where = next((said for overridden, said in origins.items() if within(key, overridden)), source)
    if fault["type"] == "extra_forbidden":
        if where == source:  # a table that only an override has
            key, where = next((each for each in origins.items() if within(each[0], key)), (key, source))
        return f"{where}: there is no key {key}{_nearest(key)}"
    if fault["type"] in ("model_type", "model_attributes_type"):
        there = ", ".join(each for each in known_keys() if each.startswith(f"{key}."))
        return f"{where}: {key} = {fault['input']!r}: this is a table, of {there}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{where}: {key} = {fault['input']!r}: {message[:1].lower()}{message[1:]}"


def within(key: str, overridden: str) -> bool:
    """True if an override of one key, or of the table that it is in, sets the other."""
    return key == overridden or key.startswith(f"{overridden}.")


def _nearest(key: str) -> str:
    """Suggest the key that was probably meant, or list those of the table."""
    known = known_keys()
    leaf = key.rpartition(".")[2]
    name = leaf.lower().replace("-", "_")
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    meant = OF_OTHERS.get(key.lower()) or " or ".join(same_leaf) or OF_OTHERS.get(name)
    if meant:
        return f"; did you mean {meant}?"
    candidates = known if "." in key else (*known, *Config.model_fields)
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7)
    if not close:
        leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known)} | OF_OTHERS
        close = [leaves[each] for each in difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)]
    if close:
        return f"; did you mean {close[0]}?"
    table = key.partition(".")[0]
    there = [candidate for candidate in known if candidate.startswith(f"{table}.")]
    return f"; there are {', '.join(there or Config.model_fields)}"
