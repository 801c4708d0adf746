"""BERT's config as `bert` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.hugging_face.keys import Keys, Unsupported

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_CLASSIFIER = "BertForSequenceClassification"


def read(keys: Keys, mask_token: int | None) -> dict[str, Any]:
    """Name, options, length, classes and task of the model: a classifier if the architecture is one, else of masked tokens.

    `mask_token`: of the folder's tokenizer; a `mask_token_id` in the config goes before it.

    Raises:
        Unsupported: it is none of ours; names the key.
    """
    keys.expect(
        is_decoder=False, add_cross_attention=False, position_embedding_type="absolute", pad_token_id=0
    )
    classifies = _CLASSIFIER in (keys.any("architectures") or ())
    vocab, length = keys.whole("vocab_size"), keys.whole("max_position_embeddings", 512)
    labels = keys.any("id2label") or {"0": "", "1": ""}
    options = {
        "vocab": vocab,
        "width": keys.whole("hidden_size", 768),
        "layers": keys.whole("num_hidden_layers", 12),
        "heads": keys.whole("num_attention_heads", 12),
        "dropout": keys.number("hidden_dropout_prob", 0.1),
        "objective": "classify" if classifies else "masked",
        "tie": keys.flag("tie_word_embeddings", True),
        "activation": keys.choice("hidden_act", _ACTIVATIONS, "gelu"),
        "epsilon": keys.number("layer_norm_eps", 1e-12),
        "hidden": keys.whole("intermediate_size", 3072),
        "max_length": length,
        "types": keys.whole("type_vocab_size", 2),
        "mask_token": _mask_token(keys.any("mask_token_id"), mask_token, vocab),
    }
    keys.require_read()
    return {
        "name": "bert",
        "options": options,
        "length": length,
        "classes": len(labels) if classifies else vocab,
        "task": "classification" if classifies else "next_token",
    }


def _mask_token(named: Any, found: int | None, vocab: int) -> int:
    token = found if named is None else named
    if not isinstance(token, int) or not 0 < token < vocab:
        raise Unsupported(
            f"mask_token_id is {token!r}, and no tokenizer.json or vocab.txt beside it names [MASK]; expected the id of "
            f"[MASK], from 1 to {vocab - 1}"
        )
    return token


def write(described: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a `bert`, with complete options. Its embedding has a row for the mask in any case.

    Raises:
        Unsupported: BERT has no such option; names it.
    """
    options = described["options"]
    masked = options["objective"] == "masked"
    if not masked and options["pool"] != "first":
        raise Unsupported(f"pool is {options['pool']!r}, and BERT classifies by the 'first' token")
    mask = options["mask_token"] or options["vocab"]
    dropout = options["dropout"]
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM" if masked else _CLASSIFIER],
        "vocab_size": options["vocab"] + (not options["mask_token"]),
        "hidden_size": options["width"],
        "num_hidden_layers": options["layers"],
        "num_attention_heads": options["heads"],
        "intermediate_size": options["hidden"] or 4 * options["width"],
        "hidden_act": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[options["activation"]],
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": options["max_length"] or described["input_shape"][0],
        "type_vocab_size": options["types"],
        "layer_norm_eps": options["epsilon"],
        "pad_token_id": 0,
        "mask_token_id": mask,
        "tie_word_embeddings": options["tie"],
        "dtype": "float32",
    }
    if not masked:
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(described["classes"])}
        config["label2id"] = {f"LABEL_{index}": index for index in range(described["classes"])}
    return config
