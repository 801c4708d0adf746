"""GPT-2, Llama and Qwen2 as `gpt` with options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.hugging_face.keys import Keys, Unsupported

FAMILIES = ("gpt2", "llama", "qwen2")
_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read(keys: Keys) -> dict[str, Any]:
    """Name, options, length and classes of the model.

    Raises:
        Unsupported: it is none of ours; names the key.
    """
    options, length = _gpt2(keys) if keys.any("model_type") == "gpt2" else _llama(keys)
    vocab = keys.whole("vocab_size")
    keys.require_read()
    return {
        "name": "gpt",
        "options": {**options, "vocab": vocab, "max_length": length},
        "length": length,
        "classes": vocab,
    }


def _gpt2(keys: Keys) -> tuple[dict[str, Any], int]:
    keys.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width = keys.whole("n_embd", 768)
    options = {
        "width": width,
        "layers": keys.whole("n_layer", 12),
        "heads": keys.whole("n_head", 12),
        "hidden": keys.whole("n_inner", 4 * width),
        "dropout": keys.number("resid_pdrop", 0.1),
        "tie": keys.flag("tie_word_embeddings", True),
        "bias": "all",
        "activation": keys.choice("activation_function", _GELU, "gelu_new"),
        "epsilon": keys.number("layer_norm_epsilon", 1e-5),
    }
    return options, keys.whole("n_positions", 1024)


def _llama(keys: Keys) -> tuple[dict[str, Any], int]:
    """Llama, and Qwen2, which has biases of query, key and value."""
    keys.choice("hidden_act", {"silu": "swiglu"}, "silu")
    keys.expect(use_sliding_window=False)
    if not keys.any("use_sliding_window"):
        keys.any("sliding_window")  # it is not used then
    kinds = keys.any("layer_types") or []
    if other := [kind for kind in kinds if kind != "full_attention"]:
        raise Unsupported(
            f"layer_types has {other[0]!r}, which these models do not have; expected 'full_attention'"
        )
    width, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    base, scaling = _rotations(keys)
    options = {
        "width": width,
        "layers": keys.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", heads),
        "head_width": keys.whole("head_dim", width // heads),
        "hidden": keys.whole("intermediate_size"),
        "tie": keys.flag("tie_word_embeddings", False),
        "bias": "qkv" if keys.any("model_type") == "qwen2" else _llama_bias(keys),
        "norm": "rms",
        "activation": "swiglu",
        "epsilon": keys.number("rms_norm_eps", 1e-6),
        "positions": "rope",
        "rope_base": base,
        "rope_scaling": scaling,
    }
    return options, keys.whole("max_position_embeddings", 2048)


def _llama_bias(keys: Keys) -> str:
    attention, mlp = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    if mlp and not attention:
        raise Unsupported("mlp_bias is true without attention_bias, which these models do not have")
    return "all" if mlp else "attention" if attention else "none"


def _rotations(keys: Keys) -> tuple[float, list[float]]:
    """Base and scaling of the rotations, as files before and since version 5 of transformers have them."""
    table = {**(keys.any("rope_scaling") or {}), **(keys.any("rope_parameters") or {})}
    base = table.get("rope_theta", keys.number("rope_theta", 10_000.0))
    kind = table.get("rope_type", table.get("type", "default"))
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported(f"partial_rotary_factor is {table['partial_rotary_factor']!r}, expected 1.0")
    keys.expect(partial_rotary_factor=1.0)
    if kind == "default":
        return float(base), []
    if kind != "llama3":
        raise Unsupported(f"rope_type is {kind!r}, expected default or llama3")
    if missing := [key for key in _LLAMA3 if not isinstance(table.get(key), int | float)]:
        raise Unsupported(
            f"rope_type is 'llama3', and {missing[0]} is {table.get(missing[0])!r}, expected a number"
        )
    return float(base), [float(table[key]) for key in _LLAMA3]


def write(described: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a `gpt`, with complete options.

    Raises:
        Unsupported: none of the families has these options; names one.
    """
    options = described["options"]
    if options["attention"] != "full":
        raise Unsupported(f"attention is {options['attention']!r}, expected 'full'")
    if options["positions"] == "learned":
        return _to_gpt2(options, described)
    return _to_llama(options, described)


def _require(options: Mapping[str, Any], family: str, **values: Any) -> None:
    for key, value in values.items():
        if options[key] != value:
            raise Unsupported(f"{key} is {options[key]!r}, expected {value!r} for {family}")


def _to_gpt2(options: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = options["heads"], options["width"]
    _require(options, "GPT-2", norm="layer")
    if options["activation"] == "swiglu":
        raise Unsupported(
            "activation is 'swiglu' with learned positions; expected positions = 'rope' or GELU"
        )
    if options["kv_heads"] not in (0, heads) or options["head_width"] not in (0, width // heads):
        raise Unsupported("GPT-2 has as many heads of keys as of queries, each of width / heads features")
    dropout = options["dropout"]
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": described["classes"],
        "n_positions": options["max_length"] or described["input_shape"][0],
        "n_embd": width,
        "n_layer": options["layers"],
        "n_head": heads,
        "n_inner": options["hidden"] or 4 * width,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}[options["activation"]],
        "layer_norm_epsilon": options["epsilon"],
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": options["tie"],
        **_COMMON,
    }


def _to_llama(options: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    heads, width, bias = options["heads"], options["width"], options["bias"]
    family = "qwen2" if bias == "qkv" else "llama"
    _require(options, "Llama and Qwen2", norm="rms", activation="swiglu")
    if options["dropout"]:
        raise Unsupported(f"dropout is {options['dropout']}, and Llama and Qwen2 have none; train with 0")
    head_width = options["head_width"] or width // heads
    if family == "qwen2" and head_width * heads != width:
        raise Unsupported(f"head_width is {head_width}, and Qwen2 has width / heads = {width // heads}")
    rotations: dict[str, Any] = {"rope_type": "default", "rope_theta": options["rope_base"]}
    if options["rope_scaling"]:
        rotations |= {"rope_type": "llama3", **dict(zip(_LLAMA3, options["rope_scaling"], strict=True))}
        rotations[_LLAMA3[3]] = int(rotations[_LLAMA3[3]])
    more = (
        {"use_sliding_window": False}
        if family == "qwen2"
        else {
            "attention_bias": bias in ("attention", "all"),
            "mlp_bias": bias == "all",
            "head_dim": head_width,
        }
    )
    return {
        "model_type": family,
        "architectures": ["Qwen2ForCausalLM" if family == "qwen2" else "LlamaForCausalLM"],
        "vocab_size": described["classes"],
        "max_position_embeddings": options["max_length"] or described["input_shape"][0],
        "hidden_size": width,
        "intermediate_size": options["hidden"] or 4 * width,
        "num_hidden_layers": options["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": options["kv_heads"] or heads,
        "hidden_act": "silu",
        "rms_norm_eps": options["epsilon"],
        "rope_parameters": rotations,
        "rope_theta": options["rope_base"],
        "tie_word_embeddings": options["tie"],
        **more,
        **_COMMON,
    }


_COMMON = {"dtype": "float32", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""No token has a meaning of its own: what begins or ends a text belongs to a tokenizer."""
