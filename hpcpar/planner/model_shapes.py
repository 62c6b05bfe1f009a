"""Shapes of a transformer as the planner sees them: the matrix products of its layers, and its parameters.

Wider than `shapes.LlamaConfig`, which is what hpcpar trains: a GPT of the papers (LayerNorm, biases, learned
positions, feed-forward of two matrices) and DeepSeek's latent attention are planned, too.

    ModelShape.named("llama3-8b")            a preset of hpcpar or of a paper ("gpt-175b", "deepseek-v3")
    ModelShape.named("config.json")          of Hugging Face
    ModelShape.named("run.toml")             the trainer's file, or a table [model] of our own fields

Shape letters: T tokens, S sequence, H hidden, F ffn, A heads, K key-value heads, D head size, V vocabulary,
E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from hpcpar.errors import ConfigError, did_you_mean
from hpcpar.planner.experts import Experts
from hpcpar.planner.read_input import finite_number, read_table, whole_number
from hpcpar.planner.shapes import PRESETS, LlamaConfig, QueryKeyNorm

Split = Literal["column", "row", "whole"]
"""How tp divides a matrix: its outputs, its inputs, or not at all."""


@dataclass(frozen=True)
class MatrixProduct:
    """A weight matrix [outputs, inputs] and the products with it.

    rows     rows of the product for each token: 1, or the experts of a token
    copies   matrices of this shape in the layer, over which the rows spread evenly: 1, or the experts
    fused    outputs of each of the parameters that it multiplies by at once; (): it is one parameter
    """

    name: str
    inputs: int
    outputs: int
    split: Split
    rows: int = 1
    copies: int = 1
    fused: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the parameters of one copy."""
        return [(outputs, self.inputs) for outputs in self.fused or (self.outputs,)]

    @property
    def weights(self) -> int:
        """Parameters of all copies."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> int:
        """FLOPs of one token's forward."""
        return 2 * self.inputs * self.outputs * self.rows


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    query_rank   width of the queries' latent vector, 0 = they have none; key_value_rank: of keys and values
    plain        part of a query head without, rotary with, rotary embedding; value: width of a value head
    """

    query_rank: int
    key_value_rank: int
    plain: int
    rotary: int
    value: int

    def __post_init__(self) -> None:
        for one in fields(self):
            whole_number(getattr(self, one.name), f"latent.{one.name}", 0 if one.name == "query_rank" else 1)


SIZES = (
    *("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_size", "ffn_size"),
    "max_sequence",
)
"""Fields of a shape that are whole numbers of at least 1."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    gated            feed-forward of three matrices, silu(gate)·up; False: of two, with GELU
    layer_norm       LayerNorm with biases, and biases of the matrices, as in GPT; False: RMSNorm, none
    positions        learned position embeddings; 0 = rotary
    experts          a mixture in place of the feed-forward, in all layers but the first_dense ones
    latent           latent attention; None = heads of keys and values
    dropout          probability, in training, of the attention's shares and of what is added to the residual
    beyond_trainer   features of a Hugging Face model that these sizes do not tell, and no model of ours has
    errors           ConfigError for sizes that are no whole numbers, or do not fit each other
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    gated: bool = True
    layer_norm: bool = False
    positions: int = 0
    tie_embeddings: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    qk_norm: QueryKeyNorm = "none"
    dropout: float = 0.0
    max_sequence: int = 4096
    beyond_trainer: str | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            whole_number(getattr(self, name), name)
        whole_number(self.positions, "positions", 0)
        for name in ("gated", "layer_norm", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be true or false")
        if self.qk_norm not in get_args(QueryKeyNorm):
            raise ConfigError(f"qk_norm = {self.qk_norm!r}; there are {', '.join(get_args(QueryKeyNorm))}")
        if finite_number(self.dropout, "dropout", or_zero=True) >= 1:
            raise ConfigError(f"dropout = {self.dropout} must be a probability from 0 to below 1")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}: each head of keys and "
                "values serves the same number of query heads"
            )
        if self.experts is not None and self.experts.first_dense >= self.layers:
            raise ConfigError(
                f"experts.first_dense = {self.experts.first_dense} leaves none of layers = {self.layers} "
                f"with experts; choose {self.layers - 1} or fewer, or leave the experts out"
            )

    @classmethod
    def gpt(
        cls, name: str, *, hidden: int, heads: int, layers: int, vocab: int = 51_200, positions: int = 2048
    ) -> ModelShape:
        """Return a GPT as in the Megatron papers: F = 4H, LayerNorm, learned positions, dropout."""
        return cls(
            *(name, vocab, hidden, layers, heads, heads, usual_head_size(hidden, heads), 4 * hidden),
            gated=False,
            layer_norm=True,
            positions=positions,
            tie_embeddings=True,
            dropout=0.1,
            max_sequence=positions,
        )

    @classmethod
    def from_llama(cls, config: LlamaConfig, name: str = "llama") -> ModelShape:
        """Return the shape of a model that hpcpar trains."""
        return cls(
            *(name, config.vocab_size, config.hidden_size, config.layers, config.heads),
            *(config.key_value_heads, config.head_width, config.ffn_width),
            tie_embeddings=config.tie_embeddings,
            experts=config.experts,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            max_sequence=config.max_sequence,
        )

    def as_llama(self) -> LlamaConfig:
        """Return the sizes as those of a model that hpcpar trains; ConfigError where it trains none such."""
        if self.untrained is not None:
            raise ConfigError(
                f"{self.name} has {self.untrained}, which hpcpar plans but does not train; take another model"
            )
        return LlamaConfig(
            *(self.vocab_size, self.hidden_size, self.layers, self.heads, self.kv_heads),
            *(self.head_size, self.ffn_size, self.max_sequence),
            tie_embeddings=self.tie_embeddings,
            dropout=self.dropout,
            qk_norm=self.qk_norm,
            experts=self.experts,
        )

    @property
    def untrained(self) -> str | None:
        """Name of a feature that no model of hpcpar's trainer has; None: it can be trained."""
        if self.beyond_trainer is not None:
            return self.beyond_trainer
        if self.latent is not None:
            return "latent attention"
        return None if self.gated and not self.layer_norm else "the feed-forward and norms of GPT"

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """Return a preset's shape, or read a Hugging Face config.json or a TOML file.

        errors   ConfigError with the list of presets; for a file that lacks a field, its name
        """
        if name.endswith((".json", ".toml")):
            return _read(Path(name))
        if name in PRESETS:
            return cls.from_llama(PRESETS[name], name)
        if name not in PUBLISHED:
            known = [*PRESETS, *PUBLISHED]
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"no model is called {name!r}; {hint}there are {', '.join(known)}, or the path of a Hugging "
                "Face config.json or of a .toml file"
            )
        return PUBLISHED[name]

    # --- matrices ---------------------------------------------------------------------------------

    @cached_property
    def attention_products(self) -> tuple[MatrixProduct, ...]:
        """Matrix products of a layer's attention, without scores and values."""
        hidden, heads = self.hidden_size, self.heads
        if self.latent is None:
            fused = tuple(count * self.head_size for count in (heads, self.kv_heads, self.kv_heads))
            return (
                MatrixProduct("queries, keys, values", hidden, sum(fused), "column", fused=fused),
                MatrixProduct("output", heads * self.head_size, hidden, "row"),
            )
        latent = self.latent
        wide = heads * (latent.plain + latent.rotary)
        key_values = latent.key_value_rank + latent.rotary
        queries: tuple[MatrixProduct, ...] = (MatrixProduct("queries", hidden, wide, "column"),)
        if latent.query_rank:
            queries = (
                MatrixProduct("query latent", hidden, latent.query_rank, "whole"),
                MatrixProduct("queries", latent.query_rank, wide, "column"),
            )
        return (
            *queries,
            MatrixProduct("key-value latent", hidden, key_values, "whole"),
            MatrixProduct(
                "keys, values", latent.key_value_rank, heads * (latent.plain + latent.value), "column"
            ),
            MatrixProduct("output", heads * latent.value, hidden, "row"),
        )

    def feed_forward_products(self, layer: int) -> tuple[MatrixProduct, ...]:
        """Matrix products of layer `layer`'s feed-forward, or of its router and experts."""
        experts, hidden = self.experts_of(layer), self.hidden_size
        times = 2 if self.gated else 1

        def up(name: str, width: int, rows: int = 1, copies: int = 1) -> MatrixProduct:
            return MatrixProduct(name, hidden, times * width, "column", rows, copies, (width,) * times)

        if experts is None:
            return up("up", self.ffn_size), MatrixProduct("down", self.ffn_size, hidden, "row")
        count, k, width = experts.count, experts.per_token, experts.ffn_size
        shared = experts.shared_ffn_size
        products = (
            MatrixProduct("router", hidden, count, "whole"),
            up("experts up", width, k, count),
            MatrixProduct("experts down", width, hidden, "row", k, count),
        )
        if not shared:
            return products
        return (
            *products,
            up("shared up", shared),
            MatrixProduct("shared down", shared, hidden, "row"),
        )

    @property
    def head_product(self) -> MatrixProduct:
        """The output projection."""
        return MatrixProduct("head", self.hidden_size, self.vocab_size, "column")

    def experts_of(self, layer: int) -> Experts | None:
        """Return the mixture of layer `layer`, from 0; None where its feed-forward is dense."""
        return None if self.experts is None or layer < self.experts.first_dense else self.experts

    # --- parameters and FLOPs -----------------------------------------------------------------------

    def parameters(self, *, active: bool = False) -> int:
        """Count the parameters of the whole model.

        active   those that one token meets: of each layer's experts k
        """
        layers = 0
        for layer, count in self.layer_kinds:
            dense, experts = self.layer_parameters(layer)
            mixture = self.experts_of(layer)
            if active and mixture is not None:
                experts = experts * mixture.per_token // mixture.count
            layers += count * (dense + experts)
        return layers + self.embedding_parameters + self.head_parameters + self.final_norm_parameters

    @property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """A layer of each kind, dense before mixture, and how many there are of it."""
        if self.experts is None:
            return ((0, self.layers),)
        dense = self.experts.first_dense
        mixtures = ((dense, self.layers - dense),)
        return ((0, dense), *mixtures) if dense else mixtures

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm before the output projection."""
        return self.hidden_size * (2 if self.layer_norm else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token and position embeddings."""
        return (self.vocab_size + self.positions) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection; 0 where it is the embedding."""
        return 0 if self.tie_embeddings else self.vocab_size * self.hidden_size

    def layer_parameters(self, layer: int, tp: int = 1) -> tuple[int, int]:
        """Return the parameters of a layer on one of tp ranks outside experts; and all those of its experts.

        Norms and routers are whole on each rank. Of fewer key-value heads than ranks, several have a copy.
        """
        whole, divided, experts = self._kind_parameters[self.experts_of(layer) is None]
        if self.latent is None and tp > self.kv_heads:
            divided += 2 * self.hidden_size * self.head_size * (tp - self.kv_heads)
        return whole + divided // tp, experts

    @cached_property
    def _kind_parameters(self) -> Mapping[bool, tuple[int, int, int]]:
        """Parameters of a layer by whether it is dense: those that tp leaves whole; divides; of experts."""
        found = {}
        for layer, _ in self.layer_kinds:
            products = (*self.attention_products, *self.feed_forward_products(layer))
            experts = sum(each.weights for each in products if each.copies > 1)
            whole, divided = self.norm_parameters, 0
            for each in products:
                if each.copies > 1:
                    continue
                bias = each.outputs if self.layer_norm else 0
                divided += (each.split != "whole") * each.weights + (each.split == "column") * bias
                whole += (each.split == "whole") * each.weights + (each.split != "column") * bias
            found[self.experts_of(layer) is None] = whole, divided, experts
        return found

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's norms, which each tp rank has whole."""
        own = 2 * self.hidden_size * (2 if self.layer_norm else 1)
        if self.latent is not None:
            own += self.latent.query_rank + self.latent.key_value_rank
        if self.qk_norm == "all":
            return own + (self.heads + self.kv_heads) * self.head_size
        return own + (2 * self.head_size if self.qk_norm == "head" else 0)

    @property
    def core_width(self) -> int:
        """Width of scores and values together over all heads: A·(D_scores + D_values); 2·A·D ordinarily."""
        if self.latent is None:
            return 2 * self.heads * self.head_size
        return self.heads * (self.latent.plain + self.latent.rotary + self.latent.value)

    def flops_per_token(self, sequence: int, *, causal: bool = False, backward: bool = True) -> int:
        """Count FLOPs of the matrix products for one token of such a sequence.

        forward    2 per weight that multiplies + 2·L·S·A·(D + D) for scores and values
        backward   twice the forward; recomputation is not counted
        causal     count half of the scores and values, which is what the mask leaves
        source     arXiv 2104.04473, appendix: counts them in full, and so do most published MFUs
        """
        core = 2 * sequence * self.core_width // (2 if causal else 1)
        layers = 0
        for layer, count in self.layer_kinds:
            products = (*self.attention_products, *self.feed_forward_products(layer))
            layers += count * (core + sum(each.flops for each in products))
        return (layers + self.head_product.flops) * (3 if backward else 1)


def usual_head_size(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(
            f"hidden_size = {hidden} does not divide among heads = {heads}; choose heads that divide it, or "
            "give the size of a head"
        )
    return hidden // heads


def _gpt(name: str, hidden: int, heads: int, layers: int) -> ModelShape:
    return ModelShape.gpt(name, hidden=hidden, heads=heads, layers=layers)


PUBLISHED: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt("gpt-1.7b", 2304, 24, 24),
        _gpt("gpt-3.6b", 3072, 32, 30),
        _gpt("gpt-7.5b", 4096, 32, 36),
        _gpt("gpt-18b", 6144, 48, 40),
        _gpt("gpt-22b", 6144, 64, 48),
        _gpt("gpt-39b", 8192, 64, 48),
        _gpt("gpt-76b", 10_240, 80, 60),
        _gpt("gpt-145b", 12_288, 96, 80),
        _gpt("gpt-175b", 12_288, 96, 96),
        _gpt("gpt-310b", 16_384, 128, 96),
        _gpt("gpt-530b", 20_480, 128, 105),
        _gpt("gpt-1t", 25_600, 160, 128),
        ModelShape("llama3-405b", 128_256, 16_384, 126, 128, 8, 128, 53_248, max_sequence=131_072),
        replace(
            ModelShape.from_llama(PRESETS["deepseek-v3-mixture"], "deepseek-v3"),
            latent=LatentAttention(1536, 512, 128, 64, 128),
            kv_heads=128,
        ),
    )
}
"""Published models that hpcpar does not train as such, by name."""


# --- files ----------------------------------------------------------------------------------------

TRAINER_SECTIONS = (
    *("model", "data", "train", "optimizer", "schedule", "mesh", "pipeline", "output", "recipe", "stage"),
    *("tensor_parallel", "context_parallel", "expert_parallel"),
)
"""Tables of the trainer's file. A file with one of them, but without [model], has its default model."""

OWN_FIELDS = {"gated", "layer_norm", "positions", "latent"}
"""Fields that the trainer's [model] lacks: a table with one of them has our fields."""


@contextmanager
def naming_file(where: object) -> Iterator[None]:
    """Let errors of what a model's file says begin with its path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model file {where}: {error}") from error


def model_section(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the [model] of a file: {} for the trainer's default, or the whole of a file without tables."""
    if "model" not in table and not table.keys() & set(TRAINER_SECTIONS):
        return table
    section = table.get("model", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'model = {section!r} must be a table: [model], and in it preset = "llama3-8b"')
    return section


def _read(path: Path) -> ModelShape:
    table = read_table(path, "model file")
    if path.suffix == ".json":
        from hpcpar.planner.hugging_face_shapes import shape_from_hugging_face  # which needs ModelShape

        return shape_from_hugging_face(table, where=str(path))
    with naming_file(path):
        section = model_section(table)
    return shape_from_table(section, where=str(path))


def shape_from_table(table: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the shape of a [model] table: the trainer's (a preset and changes to it, or a Hugging Face
    directory), or all fields of ours.

    errors   ConfigError that names the field
    """
    with naming_file(where):
        for key in table.keys() & set(SIZES):
            whole_number(table[key], key)
        _require_kinds(table)
        if "hugging_face" in table:
            return _read(Path(table["hugging_face"]) / "config.json")
        given = {key: value for key, value in table.items() if key not in ("preset", "seed", "name")}
        if "preset" not in table and OWN_FIELDS & table.keys():
            return _of_own_fields(str(table.get("name", Path(where).stem)), given)
        preset = str(table.get("preset", "tiny"))
        name = str(table.get("name", preset))
        if preset in PUBLISHED:
            return replace(_changed(PUBLISHED[preset], given), name=name)
        return ModelShape.from_llama(LlamaConfig.preset(preset, **given), name)


_TEXTS = ("name", "preset", "hugging_face", "qk_norm", "score", "drop", "balance_over")
_TABLES = ("experts", "latent")


def _require_kinds(table: Mapping[str, Any]) -> None:
    """Raise ConfigError for text, a number or a table in another's place."""
    for key, value in table.items():
        wanted: tuple[type, ...] = (bool, int, float)
        said = "a number, or true or false"
        if key in _TEXTS:
            wanted, said = (str,), "text"
        elif key in _TABLES:
            wanted, said = (Mapping,), f"a table, [model.{key}]"
        if not isinstance(value, wanted):
            raise ConfigError(f"{key} = {value!r} must be {said}")
        if isinstance(value, Mapping):
            _require_kinds(value)


def _of_own_fields(name: str, given: dict[str, Any]) -> ModelShape:
    for key in ("vocab_size", "hidden_size", "layers", "heads"):
        if key not in given:
            raise ConfigError(f"it lacks {key}; give it a whole number")
    given.setdefault("kv_heads", given["heads"])
    if "head_size" not in given:
        given["head_size"] = usual_head_size(given["hidden_size"], given["heads"])
    given.setdefault("ffn_size", 4 * given["hidden_size"])
    return ModelShape(name=name, **_with_parts(given, None, None))


def _changed(base: ModelShape, changes: dict[str, Any]) -> ModelShape:
    """Return a shape with such fields changed, and those that follow from them where they are not given."""
    given = _with_parts(changes, base.experts, base.latent)
    hidden, heads = given.get("hidden_size", base.hidden_size), given.get("heads", base.heads)
    if given.keys() & {"hidden_size", "heads"} and "head_size" not in given and base.latent is None:
        given["head_size"] = usual_head_size(hidden, heads)
    given.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
    given.setdefault("ffn_size", base.ffn_size * hidden // base.hidden_size)
    return replace(base, **given)


def _with_parts(
    given: Mapping[str, Any], experts: Experts | None, latent: LatentAttention | None
) -> dict[str, Any]:
    """Return fields of a shape with tables made `Experts` and `LatentAttention`: the given ones, changed."""
    _require_known(given, [one.name for one in fields(ModelShape) if one.name != "beyond_trainer"], "a model")
    made = dict(given)
    if "experts" in given:
        made["experts"] = Experts.of(given["experts"], experts)
    if "latent" in given:
        known = [one.name for one in fields(LatentAttention)]
        _require_known(given["latent"], known, "latent attention")
        before = {} if latent is None else {name: getattr(latent, name) for name in known}
        sizes = {**before, **given["latent"]}
        missing = [name for name in known if name not in sizes]
        if missing:
            raise ConfigError(f"latent lacks {', '.join(missing)}; give whole numbers")
        made["latent"] = LatentAttention(**sizes)
    return made


def _require_known(given: Mapping[str, Any], known: list[str], what: str) -> None:
    for key in given:
        if key not in known:
            hint = did_you_mean(key, sorted(known))
            raise ConfigError(f"{what} has no field {key!r}; {hint}there are {', '.join(sorted(known))}")
