"""Small tokenizers as published models have them, learnt from a few texts and written as `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "To be, or not to be, that is the question.",
    "The sheep sleep well; the dogs don't sleep at all!",
    "Größe, naïve café, 你好, 1234 and 5.",
] * 20

END = "<|endoftext|>"


def byte_level(size: int = 300) -> Any:
    """Byte-level pairs as GPT-2 has them, of about `size` tokens, the last of which is `END`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(TEXTS, trainer)
    found.add_special_tokens([END])
    return found


def sentence_pieces(size: int = 300) -> Any:
    """Pairs with bytes for unknown characters as Llama 2 has them: <s> begins a text, a blank is "▁", and the first one is left out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

    found = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size + 256, special_tokens=special, show_progress=False)
    found.train_from_iterator([text.replace("你好", "") for text in TEXTS], trainer)
    document = json.loads(found.to_str())
    document["added_tokens"] = []  # bytes are ordinary tokens
    found = Tokenizer.from_str(json.dumps(document))
    found.add_special_tokens([AddedToken(name, special=True) for name in special[:3]])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return found


def word_pieces(size: int = 120) -> Any:
    """Pieces of lower-case words as BERT has them: [PAD], [UNK], [CLS], [SEP] and [MASK] are ids 0 to 4."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    found.train_from_iterator(TEXTS, trainer)
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return found


def save(tokenizer: Any, folder: Path, **config: Any) -> Path:
    """Writes `tokenizer.json`, and `config` as `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
