"""Text in and out: whole characters, stop strings, stop ids and the checkpoint's own tokenizer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jax_decoder.text
import torch_decoder.text
from tests.helpers import DECODERS, copy_of, decoder, edit_config, edit_tensors

MODULES = {"torch": torch_decoder.text, "jax": jax_decoder.text}
TEXT = "a😀é中"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def save_byte_tokenizer(path: Path, added: int = 0, template: str | None = TEMPLATE) -> Path:
    """A tokenizer in which id and byte are the same, with ``added`` special tokens above 255."""
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([f"<extra_{i}>" for i in range(added)])
    whole = PreTrainedTokenizerFast(tokenizer_object=fast)
    whole.chat_template = template
    whole.save_pretrained(path)
    return path


def make_parrot(path: Path, text: str) -> None:
    """Weights that answer each byte of ``text`` with the next one; all its bytes must differ.

    Layers add nothing, so the logit of a token is its head row times the last token's embedding.
    """
    ids = list(text.encode())
    assert len(set(ids)) == len(ids)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                tensor.zero_()
            if name == "model.norm.weight":
                tensor.fill_(1.0)
        for last, following in pairwise(ids):
            tensors["lm_head.weight"][following] = tensors["model.embed_tokens.weight"][last]

    edit_tensors(path, change)


@pytest.fixture(scope="module")
def parrot(strong, tmp_path_factory):
    """A model that answers ">" with TEXT followed by "|"."""
    path = save_byte_tokenizer(copy_of(strong("llama"), tmp_path_factory.mktemp("parrot") / "model"))
    make_parrot(path, f">{TEXT}|")
    return path


@pytest.fixture(scope="module", params=list(DECODERS))
def made(request, parrot):
    with decoder(request.param, parrot, max_batch=2) as one:
        one.package = DECODERS[request.param]
        yield one


def byte_decode(ids) -> str:
    return bytes(ids).decode(errors="replace")


# ---- characters --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODULES)
def test_pieces_hold_whole_characters_only(which):
    stream = MODULES[which].StreamText(byte_decode)
    pieces = [stream.push(token) for token in TEXT.encode()]
    assert pieces == ["a", "", "", "", "😀", "", "é", "", "", "中"]


@pytest.mark.parametrize("which", MODULES)
def test_an_unfinished_character_at_the_end_is_not_shown(which):
    stream = MODULES[which].StreamText(byte_decode)
    pieces = [stream.push(token) for token in "a😀".encode()[:-1]]
    assert "".join(pieces) + stream.finish() == "a"


@pytest.mark.parametrize("which", MODULES)
def test_text_after_a_byte_that_is_no_character_still_comes(which):
    """A model may produce bytes that are no UTF-8; holding them back must not hold back the rest."""
    stream, ids = MODULES[which].StreamText(byte_decode), [0x61, 0xFF, 0x62, 0x63]
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == byte_decode(ids)


@pytest.mark.parametrize("which", MODULES)
def test_tokenizers_that_drop_a_leading_space_keep_it_in_the_stream(which):
    words = {1: " the", 2: " cat", 3: "s"}
    stream = MODULES[which].StreamText(lambda ids: "".join(words[i] for i in ids).lstrip())
    assert [stream.push(token) for token in (1, 2, 3)] == ["the", " cat", "s"]


def test_the_stream_gives_characters_as_they_become_whole(made):
    assert list(made.stream(">", max_new_tokens=10)) == list(TEXT)


def test_joined_pieces_equal_the_whole_text(made):
    for count in range(1, 12):
        whole = made.generate([">"], max_new_tokens=count)[0].text
        pieces = list(made.stream(">", max_new_tokens=count))
        assert "".join(pieces) == whole.rstrip("\ufffd"), "only the last, unfinished character may be missing"
        assert all(pieces) and not any("\ufffd" in piece for piece in pieces)


# ---- stops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["END"], "some ENd text END more", "some ENd text "),
        (["aab"], "aaab!", "a"),
        (["xyz", "b"], "abc", "a"),
        (["bc", "abcd"], "zabcd", "za"),
        (["END"], "text EN", "text EN"),
        (["a"], "abc", ""),
        ([], "abc", "abc"),
    ],
)
def test_nothing_past_a_stop_string_is_shown(which, stop, text, shown):
    """What may begin a stop string is held back, and comes when it was none."""
    stream, pieces, ids = MODULES[which].StreamText(byte_decode, stop), [], []
    for token in text.encode():
        if stream.stopped:
            break
        ids.append(token)
        pieces.append(stream.push(token))
    assert "".join(pieces) + stream.finish() == shown
    assert stream.stopped == (shown != text)
    assert MODULES[which].cut_at_stop(byte_decode(ids), stop) == shown


@pytest.mark.parametrize(("stop", "text", "tokens"), [("é", "a😀", 7), (["中", "no such"], "a😀é", 10), ("😀é", "a", 7)])
def test_a_stop_string_ends_the_row(made, stop, text, tokens):
    done = made.generate([">"], max_new_tokens=20, stop=stop)[0]
    assert (done.text, done.finish_reason, len(done.token_ids)) == (text, "stop", tokens)
    assert len(done.logprobs) == tokens
    assert "".join(made.stream(">", max_new_tokens=20, stop=stop)) == text


def test_a_stop_string_ends_its_own_row_only(made):
    """The other row has to go on although both share each step."""
    done = made.generate([">", "😀"], max_new_tokens=6, stop="a")
    assert (done[0].text, done[0].finish_reason) == ("", "stop")
    assert (done[1].text, done[1].finish_reason) == ("é中|", "length")


def test_a_stop_id_is_a_token_but_no_text(made):
    done = made.generate([">"], max_new_tokens=20, stop_token_ids=[ord("|")])[0]
    assert (done.text, done.finish_reason) == (TEXT, "stop")
    assert done.token_ids == [*TEXT.encode(), ord("|")]
    assert "".join(made.stream(">", max_new_tokens=20, stop_token_ids=[ord("|")])) == TEXT


@pytest.mark.parametrize("stop", [[""], [7], ["a", None]])
def test_a_stop_that_is_no_text_is_refused(made, stop):
    with pytest.raises(made.package.ConfigError, match="stop"):
        made.generate([">"], max_new_tokens=1, stop=stop)


# ---- the stream as a guest of the decoder ------------------------------------------------------


def test_an_abandoned_stream_frees_the_decoder(made):
    stream = made.stream(">", max_new_tokens=20)
    assert next(stream) == "a"
    with pytest.raises(made.package.DecoderError, match="unfinished stream"):
        made.generate([">"], max_new_tokens=1)
    stream.close()
    assert made.generate([">"], max_new_tokens=1)[0].text == "a"


def test_a_stream_takes_one_prompt(made):
    with pytest.raises(made.package.DecoderError, match="one prompt"):
        next(made.stream([">", ">"], max_new_tokens=1))


# ---- the tokenizer -----------------------------------------------------------------------------


def test_chat_messages_go_through_the_template(made):
    assert made.encode([{"role": "user", "content": "hi"}]) == list(b"user:hi;a:")
    assert made.encode(">") == [ord(">")]
    assert made.generate([[{"role": "user", "content": "hi"}], ">"], max_new_tokens=1)[0].prompt_token_ids == list(b"user:hi;a:")


@pytest.mark.parametrize("which", DECODERS)
def test_a_checkpoint_without_tokenizer_takes_ids_only(which, strong):
    with decoder(which, strong("llama"), max_batch=1) as made:
        assert made.generate([[1, 2]], max_new_tokens=1)[0].text is None
        with pytest.raises(DECODERS[which].CheckpointError, match=r"tokenizer\.json"):
            made.generate(["text"], max_new_tokens=1)


@pytest.mark.parametrize("which", DECODERS)
def test_a_tokenizer_larger_than_the_vocabulary_is_noticed(which, strong, tmp_path):
    """A wrong tokenizer looks like a poor model, because a gather on the device clamps its ids."""
    path = save_byte_tokenizer(copy_of(strong("llama"), tmp_path / "model"), added=44, template=None)
    with decoder(which, path, max_batch=1) as made:
        with pytest.raises(DECODERS[which].DecoderError, match=r"id 258 at position 2.*256"):
            made.generate(["ab<extra_2>"], max_new_tokens=1)
        with pytest.raises(DECODERS[which].CheckpointError, match="no chat template"):
            made.encode([{"role": "user", "content": "hi"}])
        assert len(made.generate(["ab"], max_new_tokens=1)[0].token_ids) == 1


@pytest.mark.parametrize("which", DECODERS)
def test_a_damaged_tokenizer_file_is_named(which, strong, tmp_path):
    path = save_byte_tokenizer(copy_of(strong("llama"), tmp_path / "model"))
    file = path / "tokenizer.json"
    file.write_text(file.read_text()[:100])
    with decoder(which, path, max_batch=1) as made, pytest.raises(DECODERS[which].CheckpointError, match="cannot be read"):
        made.encode("text")


@pytest.mark.parametrize("which", DECODERS)
def test_a_stop_id_of_the_checkpoint_ends_the_text(which, parrot, tmp_path):
    path = copy_of(parrot, tmp_path / "model")
    (path / "generation_config.json").unlink(missing_ok=True)
    edit_config(path, eos_token_id=[3, ord("|")])
    with decoder(which, path, max_batch=1) as made:
        done = made.generate([">"], max_new_tokens=20)[0]
    assert (done.text, done.token_ids[-1], done.finish_reason) == (TEXT, ord("|"), "stop")
