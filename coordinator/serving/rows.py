"""The tensors of a request as rows of a model, and logits as the outputs that a request asks for.

    array, images     x [rows, …], FP32 or INT32
    texts             text [rows], BYTES; or x, their token ids
    tables            an input for each column, [rows] or [rows, 1]: BYTES for categories, FP64 for numbers; or x, the encoded rows

Outputs: `logits`; with named classes also `label`, BYTES; of a model that predicts a quantity `value`, FP64, in its own unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.errors import Refusal
from coordinator.serving.inference import InferRequest, Tensor, TensorSpec, invalid
from edge_client.data.connector import DataProblem
from edge_client.serving.records import read_records
from edge_client.serving.texts import beginning, end, token_ids
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema

_NUMBERS = (
    "FP32",
    "FP64",
    "FP16",
    "INT64",
    "INT32",
    "INT16",
    "INT8",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "BOOL",
)


@dataclass(frozen=True)
class Form:
    """What a model takes and gives. `vocabulary`: token ids are below it; 0 of models that take no ids."""

    name: str
    schema: DataSchema
    input_shape: tuple[int, ...]
    input_dtype: str
    output_shape: tuple[int, ...]
    vocabulary: int

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """As the metadata lists them."""
        if self.schema.text is not None:
            return (TensorSpec("text", "BYTES", (-1,)),)
        if self.schema.kind == "table":
            return [
                TensorSpec(column.name, "BYTES" if column.kind == "category" else "FP64", (-1,))
                for column in self.schema.columns
            ]
        return (self._x,)

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        found = [TensorSpec("logits", "FP32", (-1, *self.output_shape))]
        if self.schema.label_scale is not None:
            found.append(TensorSpec("value", "FP64", (-1,)))
        elif self.schema.classes and len(self.output_shape) == 1:
            found.append(TensorSpec("label", "BYTES", (-1,)))
        return found

    @property
    def _x(self) -> TensorSpec:
        return TensorSpec("x", "INT32" if self.input_dtype == "int32" else "FP32", (-1, *self.input_shape))

    def read(self, request: InferRequest) -> npt.NDArray[Any]:
        """The rows of a request, [N, …] in the model's dtype.

        Raises:
            Refusal: 400: a tensor is unknown, twice there, missing, or not what the model takes.
        """
        named = {tensor.name: tensor for tensor in request.inputs}
        if len(named) < len(request.inputs):
            raise invalid("duplicate_input", "an input is there twice")
        if not request.inputs:
            raise invalid("unknown_input", f"there is no input; {self.name} takes {self._expected()}")
        if "x" in named and len(named) == 1 and not any(each.name == "x" for each in self.inputs):
            return self._array(named["x"])
        expected = {each.name for each in self.inputs}
        if unknown := sorted(named.keys() ^ expected):
            raise invalid(
                "unknown_input",
                f"input {unknown[0][:100]!r} is {'missing' if unknown[0] in expected else 'unknown'}; {self.name} takes {self._expected()}",
            )
        if self.schema.text is not None or self.schema.kind == "table":
            return self._natural(named)
        return self._array(named["x"])

    def read_prompt(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The token ids of a prompt.

        Raises:
            Refusal: 400 `prompt_too_long`, found without reading all of it; `wrong_row`: the model has no tokens for the text.
        """
        ids = self._ids(prompt) if isinstance(prompt, str) else prompt
        if len(ids) > self.input_shape[0]:
            text = f"the prompt has more than the {self.input_shape[0]} tokens that {self.name} takes"
            raise Refusal(400, "prompt_too_long", text, param="prompt")
        return ids

    def _ids(self, prompt: str) -> Sequence[int]:
        schema = self.schema.text
        if schema is None:
            raise invalid("wrong_row", f"{self.name} knows no texts; send the prompt as token ids")
        try:
            return token_ids([beginning(prompt, schema, self.input_shape[0])], schema, "prompt")[0]
        except DataProblem as error:
            raise invalid("wrong_row", str(error)[:1000]) from None

    def write(self, logits: npt.NDArray[np.float32], wanted: Sequence[str]) -> list[Tensor]:
        """The outputs; all if none is named. Raises: Refusal: 400 `unknown_output`; 500 `not_finite`."""
        self.check_outputs(wanted)
        if not np.isfinite(logits).all():
            raise Refusal(500, "not_finite", f"{self.name} answers with a number that is not finite")
        return [self._output(name, logits) for name in (wanted or [each.name for each in self.outputs])]

    def check_outputs(self, wanted: Sequence[str]) -> None:
        """Raises: Refusal: 400 `unknown_output`."""
        if not wanted:
            return
        known = [each.name for each in self.outputs]
        for name in wanted:
            if name not in known:
                raise invalid(
                    "unknown_output",
                    f"output {name[:100]!r} is unknown; {self.name} gives {', '.join(known)}",
                )

    def _output(self, name: str, logits: npt.NDArray[np.float32]) -> Tensor:
        if name == "logits":
            return Tensor(name, "FP32", logits)
        if name == "value":
            assert self.schema.label_scale is not None
            mean, deviation = self.schema.label_scale
            return Tensor(name, "FP64", logits[:, 0].astype(np.float64) * deviation + mean)
        labels = np.empty(len(logits), object)
        labels[:] = [self.schema.class_name(index).encode() for index in logits.argmax(-1).tolist()]
        return Tensor(name, "BYTES", labels)

    def _array(self, tensor: Tensor) -> npt.NDArray[Any]:
        expected = self._x
        x = tensor.array
        if x.ndim == 0 or x.shape[1:] != self.input_shape:
            raise invalid(
                "wrong_shape",
                f"input x is {list(x.shape)}, {self.name} takes [N, {', '.join(map(str, self.input_shape))}]",
            )
        kinds = "iu" if self.input_dtype == "int32" else "iufb"
        if x.dtype.kind not in kinds:
            raise invalid(
                "wrong_datatype", f"input x is {tensor.datatype}, {self.name} takes {expected.datatype}"
            )
        if not len(x):
            raise invalid("wrong_shape", "input x has no rows, expected at least one")
        if self.input_dtype == "int32":
            if int(x.min()) < 0 or int(x.max()) >= self.vocabulary:
                raise invalid(
                    "unknown_id",
                    f"input x has ids from {x.min()} to {x.max()}, {self.name} takes 0 to {self.vocabulary - 1}",
                )
            return x.astype(np.int32)
        numbers = x
        if x.dtype != np.float32:
            with np.errstate(over="ignore"):
                numbers = x.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise invalid("not_finite", "input x holds a number that is not finite, or too large for FP32")
        return numbers

    def _natural(self, named: dict[str, Tensor]) -> npt.NDArray[Any]:
        if self.schema.text is not None:
            records = self._texts(_column(named["text"], texts=True), self.schema.text)
        else:
            kinds = {column.name: column.kind == "category" for column in self.schema.columns}
            columns = {name: _column(tensor, texts=kinds[name]) for name, tensor in named.items()}
            lengths = {name: len(values) for name, values in columns.items()}
            if len(set(lengths.values())) > 1:
                raise invalid("wrong_shape", f"columns have several lengths: {lengths!r:.200}")
            rows = next(iter(lengths.values()))
            records = [{name: values[row] for name, values in columns.items()} for row in range(rows)]
        try:
            return read_records(records, self.schema, self.name).x
        except DataProblem as error:
            raise invalid("wrong_row", str(error)[:1000]) from None

    def _texts(self, values: list[Any], schema: TextSchema) -> list[Any]:
        """The texts, or what the model sees of longer ones."""
        part = end if schema.predicts == "next_token" else beginning
        try:
            return [each and part(each, schema, self.input_shape[0]) for each in values]
        except DataProblem as error:
            raise invalid("wrong_row", str(error)[:1000]) from None

    def _expected(self) -> str:
        listed = self.inputs
        names = ", ".join(each.name for each in listed[:20])
        return f"{names} and {len(listed) - 20} more" if len(listed) > 20 else names


def _column(tensor: Tensor, *, texts: bool) -> list[Any]:
    """The values of one column: a list of texts or numbers; NaN is a missing number, an empty text a missing category."""
    array = tensor.array
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 1):
        raise invalid(
            "wrong_shape", f"input {tensor.name!r:.100} is {list(array.shape)}, expected [N] or [N, 1]"
        )
    values: list[Any] = array.ravel().tolist()
    if tensor.datatype == "BYTES":
        try:
            decoded = [each.decode() for each in values]
        except UnicodeDecodeError:
            raise invalid(
                "wrong_datatype", f"input {tensor.name!r:.100} holds a value that is not UTF-8"
            ) from None
        return [each or None for each in decoded]
    if tensor.name == "text" and texts:
        raise invalid("wrong_datatype", f"input text is {tensor.datatype}, expected BYTES")
    return values
