"""The keys of a config.json, each of which must be understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HARMLESS = frozenset({
    "model_type", "architectures", "transformers_version", "_name_or_path", "_attn_implementation", "dtype", "torch_dtype",
    "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id",
    "problem_type", "num_labels", "finetuning_task", "task_specific_params", "pretraining_tp", "gradient_checkpointing", "n_ctx",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn", "max_window_layers", "attention_dropout", "attn_pdrop", "embd_pdrop",
    "attention_probs_dropout_prob", "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "mask_token_id", "auto_map",
})  # fmt: skip
"""They change no logits: names, dropout, initial weights, what a library returns, how it computes."""


class Unsupported(ValueError):
    """A model that is none of ours; the message names the key."""


class Keys:
    """A config of which every key is read, expected, or harmless.

    Raises of all methods:
        Unsupported: a key is missing, or its value is not what ours can have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def any(self, key: str) -> Any:
        """The value, None where there is none."""
        self._read.add(key)
        return self._config.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of 1 or more."""
        value = self.any(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Unsupported(f"{key} is {value!r}, expected a whole number of 1 or more")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.any(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise Unsupported(f"{key} is {value!r}, expected a number of 0 or more")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.any(key)
        if value is not None and not isinstance(value, bool):
            raise Unsupported(f"{key} is {value!r}, expected true or false")
        return default if value is None else value

    def choice(self, key: str, known: Mapping[str, str], default: str) -> str:
        """What `known` has for the value."""
        value = self.any(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in known:
            raise Unsupported(f"{key} is {value!r}, expected one of {', '.join(known)}")
        return known[value]

    def expect(self, **values: Any) -> None:
        """Each of these keys is missing, null, or has this value."""
        for key, value in values.items():
            found = self.any(key)
            if found is not None and found != value:
                raise Unsupported(f"{key} is {found!r}, which these models do not have; expected {value!r}")

    def require_read(self) -> None:
        """No other key is set."""
        for key, value in self._config.items():
            if key not in self._read and key not in _HARMLESS and value not in (None, False, [], {}):
                raise Unsupported(
                    f"{key} = {str(value)[:60]!r} is not known here; if it does not change what the model computes, remove it"
                )
