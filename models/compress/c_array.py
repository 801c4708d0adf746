"""A `.tflite` as C source, for firmware without a file system."""

from __future__ import annotations


def c_array(tflite: bytes, name: str = "g_model") -> str:
    """`model.cc`: the file as an array that the linker puts into flash, aligned for tflite-micro, and its length."""
    lines = [
        "  " + ", ".join(f"0x{byte:02x}" for byte in tflite[start : start + 12]) + ","
        for start in range(0, len(tflite), 12)
    ]
    return (
        f"// {len(tflite)} bytes, a .tflite for tflite-micro\n"
        f"alignas(16) extern const unsigned char {name}[] = {{\n"
        + "\n".join(lines)
        + f"\n}};\nextern const unsigned int {name}_len = {len(tflite)};\n"
    )
