"""What a model's ``config.json`` says of its geometry: what tensor parallelism divides, what memory follows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.errors import DeployError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Architectures whose decoder layers alternate between gated delta net and attention.
_HYBRID = ("Qwen3_5", "Qwen3Next")
_MAX_REASON = 200  # characters, of which the file's own values are a part
_FP4_BITS = 4 + 8 / 16  # nvfp4: an fp8 scale for every 16 weights


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta net layers: states of ``value_heads x value_dim x key_dim``, and a convolution's window beside."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes: int  # of one element


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture-of-experts layers: ``intermediate`` is one expert's width; the first ``dense_layers`` have none."""

    count: int
    intermediate: int
    shared_intermediate: int
    dense_layers: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention; ``index_dim`` is 0 without a sparse-attention indexer."""

    kv_rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are stored; ``block`` is (output, input) of block-wise scales. ``bits`` are those of a weight."""

    method: str
    bits: float
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()  # names or patterns of layers that are not quantised

    def covers(self, layer: str) -> bool:
        """Whether layers of this kind, such as ``linear_attn``, are quantised: no ignored name speaks of it."""
        return not any(layer in name for name in self.ignored)


@dataclass(frozen=True, slots=True)
class Model:
    """The target's geometry. ``weight_bytes``: of its weight files, None where they were not seen."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_layers: int
    vocabulary: int
    context: int
    gated_attention: bool
    tied_embeddings: bool
    multimodal: bool
    dtype_bytes: int
    sliding: bool
    recurrent: Recurrent | None
    experts: Experts | None
    latent: Latent | None
    quantization: Quantization | None
    weight_bytes: int | None

    @property
    def sparse_attention(self) -> bool:
        """Whether attention is DeepSeek's sparse one, with an indexer of its own kernels."""
        return self.latent is not None and self.latent.index_dim > 0


@dataclass(frozen=True, slots=True)
class Drafter:
    """A DFLASH drafter's geometry, and what it says of the target that it was trained for."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    block_size: int | None
    mask_token_id: int | None
    target_layers: int | None
    target_layer_ids: tuple[int, ...] | None
    rope_base: float | None
    rope_base_is_nested: bool  # inside rope_parameters alone, where early versions do not look
    sliding_layers: int
    sliding_window: int | None
    dtype_bytes: int
    weight_bytes: int | None


class _Config:
    """A JSON object whose values are taken by type; the first bad one raises :class:`DeployError` ``DD611``."""

    def __init__(self, where: str, *tables: Mapping[str, Any]) -> None:
        self._where = where
        self._tables = tables

    def get(self, *names: str) -> Any:
        """The first of the names that a table has, the inner tables before the outer ones."""
        for table in self._tables:
            for name in names:
                if table.get(name) is not None:
                    return table[name]
        return None

    def bad(self, why: str) -> DeployError:
        if len(why) > _MAX_REASON:
            why = why[:_MAX_REASON] + " ..."
        return DeployError("DD611", f"{self._where}: {why}", "is this the config.json of a model that sglang serves?")

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer (or 0 where that is the default)."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise self.bad(f"{names[0]} is {value!r}, not a size")
        if value == 0 and default != 0:
            raise self.bad(f"{names[0]} is 0")
        return value

    def table(self, *names: str) -> Mapping[str, Any]:
        value = self.get(*names)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(f"{names[0]} is not a table")
        return value

    def number(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(f"{name} is {value!r}, not a number")
        return float(value)

    def sizes(self, value: Any, name: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 40 for item in value):
            raise self.bad(f"{name} is not a list of sizes")
        return tuple(value)

    def architecture(self) -> str:
        value = self.get("architectures")
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise self.bad("architectures names no class")
        return value[0]

    def layer_types(self, layers: int) -> list[str] | None:
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers or not all(isinstance(item, str) for item in value):
            raise self.bad(f"layer_types does not name {layers} layers")
        return value

    def dtype_bytes(self) -> int:
        return _BYTES.get(str(self.get("dtype", "torch_dtype")), 2)


def read_model(config: Mapping[str, Any], where: str = "config.json", *, weight_bytes: int | None = None) -> Model:
    """The target that a parsed ``config.json`` describes; text settings may be nested in ``text_config``.

    Raises :class:`DeployError` ``DD611``, with ``where`` in front, for what is missing or no size.
    """
    outer = _Config(where, config)
    inner = outer.table("text_config")
    text = _Config(where, inner, config)
    architecture = outer.architecture()
    layers, hidden = text.size("num_hidden_layers"), text.size("hidden_size")
    heads = text.size("num_attention_heads")
    kinds = text.layer_types(layers)
    hybrid = architecture.startswith(_HYBRID)
    recurrent = _recurrent(text, layers, kinds) if hybrid else None
    experts = _experts(text)
    return Model(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=text.size("intermediate_size", default=0 if experts else None),
        heads=heads,
        kv_heads=text.size("num_key_value_heads", default=heads),
        head_dim=text.size("head_dim", default=max(hidden // heads, 1)),
        attention_layers=layers - (recurrent.layers if recurrent else 0),
        vocabulary=text.size("vocab_size"),
        context=text.size("max_position_embeddings"),
        gated_attention=hybrid and text.get("attn_output_gate") is not False,
        tied_embeddings=text.get("tie_word_embeddings") is True,
        multimodal="vision_config" in config,
        dtype_bytes=text.dtype_bytes(),
        sliding=kinds is not None and "sliding_attention" in kinds,
        recurrent=recurrent,
        experts=experts,
        latent=_latent(text),
        quantization=_quantization(outer, inner),
        weight_bytes=weight_bytes,
    )


def read_drafter(config: Mapping[str, Any], where: str = "config.json", *, weight_bytes: int | None = None) -> Drafter:
    """The DFLASH drafter that a parsed ``config.json`` describes. Raises :class:`DeployError` ``DD611``."""
    outer = _Config(where, config)
    text = _Config(where, outer.table("text_config"), config)
    own = _Config(where, outer.table("dflash_config"), config)
    layers, hidden, heads = text.size("num_hidden_layers"), text.size("hidden_size"), text.size("num_attention_heads")
    ids = own.get("target_layer_ids")
    kinds = text.layer_types(layers)
    top, nested = text.get("rope_theta"), _rope_parameters(text, kinds)
    base = top if top is not None else nested
    return Drafter(
        architecture=outer.architecture(),
        layers=layers,
        hidden=hidden,
        intermediate=text.size("intermediate_size"),
        heads=heads,
        kv_heads=text.size("num_key_value_heads", default=heads),
        head_dim=text.size("head_dim", default=max(hidden // heads, 1)),
        vocabulary=text.size("vocab_size"),
        context=text.size("max_position_embeddings"),
        block_size=None if own.get("block_size") is None else own.size("block_size"),
        mask_token_id=None if own.get("mask_token_id") is None else own.size("mask_token_id", default=0),
        target_layers=None if own.get("num_target_layers") is None else own.size("num_target_layers"),
        target_layer_ids=None if ids is None else own.sizes(ids, "target_layer_ids"),
        rope_base=None if base is None else text.number(base, "rope_theta"),
        rope_base_is_nested=top is None and nested is not None,
        sliding_layers=kinds.count("sliding_attention") if kinds else 0,
        sliding_window=None if text.get("sliding_window") is None else text.size("sliding_window"),
        dtype_bytes=text.dtype_bytes(),
        weight_bytes=weight_bytes,
    )


def _rope_parameters(text: _Config, kinds: list[str] | None) -> Any:
    """The RoPE base inside ``rope_parameters``, which may be a table for each kind of layer."""
    table = text.table("rope_parameters", "rope_scaling")
    if table.get("rope_theta") is not None:
        return table["rope_theta"]
    for kind in kinds or ():
        inner = table.get(kind)
        if isinstance(inner, dict) and inner.get("rope_theta") is not None:
            return inner["rope_theta"]
    return None


def _recurrent(text: _Config, layers: int, kinds: list[str] | None) -> Recurrent:
    if kinds is not None:
        count = kinds.count("linear_attention")
    else:
        every = text.size("full_attention_interval", default=4)
        count = layers - layers // every
    state = str(text.get("mamba_ssm_dtype") or "float32")
    if state not in _BYTES:
        raise text.bad(f"mamba_ssm_dtype is {state!r}")
    return Recurrent(
        layers=count,
        key_heads=text.size("linear_num_key_heads"),
        value_heads=text.size("linear_num_value_heads"),
        key_dim=text.size("linear_key_head_dim"),
        value_dim=text.size("linear_value_head_dim"),
        conv_kernel=text.size("linear_conv_kernel_dim"),
        state_bytes=_BYTES[state],
    )


def _experts(text: _Config) -> Experts | None:
    count = text.size("num_experts", "n_routed_experts", default=0)
    if count == 0:
        return None
    intermediate = text.size("moe_intermediate_size")
    shared = text.size("n_shared_experts", default=0) * intermediate
    return Experts(
        count=count,
        intermediate=intermediate,
        shared_intermediate=text.size("shared_expert_intermediate_size", default=0) or shared,
        dense_layers=text.size("first_k_dense_replace", default=0),
    )


def _latent(text: _Config) -> Latent | None:
    if text.get("kv_lora_rank") is None:
        return None
    return Latent(
        kv_rank=text.size("kv_lora_rank"),
        q_rank=text.size("q_lora_rank", default=0),
        nope_dim=text.size("qk_nope_head_dim"),
        rope_dim=text.size("qk_rope_head_dim"),
        value_dim=text.size("v_head_dim"),
        index_heads=text.size("index_n_heads", default=0),
        index_dim=text.size("index_head_dim", default=0) if text.get("index_topk") is not None else 0,
    )


def _quantization(outer: _Config, inner: Mapping[str, Any]) -> Quantization | None:
    table = outer.table("quantization_config") or _Config("", inner).table("quantization_config")
    if not table:
        return None
    method = str(table.get("quant_method") or "modelopt").lower()
    algorithm = f"{table.get('quant_algo')} {table.get('format')}".lower()
    ignored = table.get("ignored_layers") or table.get("modules_to_not_convert") or table.get("ignore") or []
    names = tuple(str(name) for name in ignored) if isinstance(ignored, list) else ()
    block = table.get("weight_block_size")
    if "fp4" in algorithm or "fp4" in method:
        return Quantization("nvfp4", _FP4_BITS, None, names)
    bits = outer.number(table.get("bits", table.get("num_bits", 8)), "bits")
    sizes = None if block is None else outer.sizes(block, "weight_block_size")
    if sizes is not None and (len(sizes) != 2 or 0 in sizes):
        raise outer.bad(f"weight_block_size is {block!r}")
    return Quantization(method, bits, (sizes[0], sizes[1]) if sizes else None, names)


def estimated_weight_bytes(model: Model) -> int:
    """The bytes of the weights from the geometry alone, for where their files were not seen; within a few per cent.

    Norms, routers and vision towers are left out. Linear layers of the decoder have the quantisation's width,
    embeddings and the head are never quantised.
    """
    wide, quantization = model.dtype_bytes, model.quantization
    narrow = quantization.bits / 8 if quantization else float(wide)

    def width(kind: str) -> float:
        return narrow if quantization is None or quantization.covers(kind) else float(wide)

    total = float(model.vocabulary * model.hidden * (1 if model.tied_embeddings else 2) * wide)
    total += model.attention_layers * _attention_weights(model) * width("self_attn")
    if model.recurrent:
        part = model.recurrent
        keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
        total += part.layers * model.hidden * (2 * keys + 3 * values + 2 * part.value_heads) * width("linear_attn")
    dense = model.layers
    if model.experts:
        experts = model.experts
        dense = experts.dense_layers
        columns = experts.count * experts.intermediate + experts.shared_intermediate
        total += (model.layers - dense) * 3 * model.hidden * columns * width("mlp")
    return int(total + dense * 3 * model.hidden * model.intermediate * width("mlp"))


def _attention_weights(model: Model) -> int:
    latent = model.latent
    if latent is None:
        queries = model.heads * model.head_dim
        return model.hidden * (queries * (2 + model.gated_attention) + 2 * model.kv_heads * model.head_dim)
    query = latent.nope_dim + latent.rope_dim
    queries = model.heads * query
    total = model.hidden * latent.q_rank + latent.q_rank * queries if latent.q_rank else model.hidden * queries
    total += model.hidden * (latent.kv_rank + latent.rope_dim)
    total += latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim)
    total += model.heads * latent.value_dim * model.hidden
    if latent.index_dim:
        total += latent.q_rank * latent.index_heads * latent.index_dim + model.hidden * (
            latent.index_dim + latent.index_heads
        )
    return total


def drafter_weight_bytes(drafter: Drafter) -> int:
    """The drafter's weights: of its files, else from its geometry. Embeddings and head are the target's."""
    if drafter.weight_bytes is not None:
        return drafter.weight_bytes
    attention = drafter.hidden * drafter.head_dim * 2 * (drafter.heads + drafter.kv_heads)
    layers = drafter.layers * (attention + 3 * drafter.hidden * drafter.intermediate)
    taps = len(drafter.target_layer_ids or ()) * drafter.hidden * drafter.hidden
    return (layers + taps) * drafter.dtype_bytes
