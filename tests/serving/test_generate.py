"""Tokens of transformers' ``generate``, with a tiny real model: counted right, and undone."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

import cirron_otel as ci
from cirron_otel.serving.generate import count_tokens
from helpers import ProgramRun, Rows, RunProgram, read_spool, tree_text

PAD, END = 0, 1


@pytest.fixture(scope="module")
def model() -> Any:
    """A GPT-2 with random weights, which says what it is asked to by nobody."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=2,
        eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def recording(model: Any) -> Any:  # noqa: ARG001 - transformers is imported by then
    """A recording with the hook of transformers alone, and without its forward scopes."""
    return ci.profile(frameworks=["transformers"])


def recorded() -> Rows:
    """What was recorded, once it is all written."""
    ci.flush()
    return read_spool()


def marks_of(rows: Rows, name: str) -> dict[str, Any]:
    """The marks of the only span of this name."""
    return {mark.name: mark.value for mark in rows.marks_of(rows.one(name))}


IDS = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, 10]])
MASK = (IDS != PAD).long()


def test_a_batch_is_counted_without_its_padding(model: Any, recording: Any) -> None:  # noqa: ARG001
    """Six tokens of prompts in two rows, and each answer's own tokens, on scope and request."""
    with ci.request():
        result = model.generate(IDS, attention_mask=MASK, max_new_tokens=5, do_sample=False)
    new = result[:, 4:].tolist()
    made = sum(row.index(END) + 1 if END in row else len(row) for row in new)
    rows = recorded()
    assert tree_text(rows) == "cirron.session (open)\n  request\n    generate"
    for name in ("generate", "request"):
        marks = marks_of(rows, name)
        assert (marks["input_tokens"], marks["output_tokens"]) == (6, made)
        assert marks["total_tokens"] == 6 + made
    attrs = rows.one("request").attrs
    assert (attrs["gen_ai.provider.name"], attrs["gen_ai.operation.name"]) == (
        "huggingface", "text_completion",
    )  # fmt: skip
    assert attrs["gen_ai.usage.output_tokens"] == made


def test_several_calls_of_one_request_add_up(model: Any, recording: Any) -> None:  # noqa: ARG001
    """A request that generates twice has the tokens of both."""
    with ci.request():
        for _ in range(2):
            model.generate(IDS, attention_mask=MASK, max_new_tokens=2, min_new_tokens=2)
    attrs = recorded().one("request").attrs
    assert (attrs["gen_ai.usage.input_tokens"], attrs["gen_ai.usage.output_tokens"]) == (12, 8)


class _Config:
    """A generation config as far as it is read."""

    def __init__(self, pad: Any, eos: Any) -> None:
        self.pad_token_id, self.eos_token_id = pad, eos


class _Model:
    """A model as far as counting asks it."""

    def __init__(self, pad: Any, eos: Any, *, encoder_decoder: bool = False) -> None:
        self.generation_config = _Config(pad, eos)
        self.config = type("C", (), {"is_encoder_decoder": encoder_decoder})()


@pytest.mark.parametrize(
    ("pad", "eos", "new", "made"),
    [
        (0, 1, [[3, 1, 0, 0], [3, 4, 5, 6]], 6),
        (1, 1, [[3, 1, 1, 1], [3, 4, 5, 1]], 6),  # the end is the padding, too
        (0, [1, 2], [[2, 0, 0, 0], [3, 4, 1, 0]], 4),
        (0, None, [[3, 0, 0, 0], [3, 4, 5, 6]], 5),
        (None, None, [[3, 0, 0, 0], [3, 4, 5, 6]], 8),
        (0, torch.tensor([1]), [[3, 1, 0, 0]], 2),
    ],
)
def test_what_follows_an_end_is_no_output(pad: Any, eos: Any, new: Any, made: int) -> None:
    """Each answer counts up to its first end, that one included, however it is padded."""
    prompt = torch.tensor([[7, 8]] * len(new))
    result = torch.cat([prompt, torch.tensor(new)], dim=1)
    given, counted = count_tokens(_Model(pad, eos), (prompt,), {}, result)
    assert (int(given), int(counted)) == (prompt.numel(), made)


def test_prompts_of_every_kind() -> None:
    """Embeddings, encoders, several answers for one prompt, and an output object."""
    ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    decoder = _Model(0, 1)
    several = torch.tensor([[0, 5, 6, 9], [0, 5, 6, 9]])
    given, made = count_tokens(decoder, (), {"input_ids": ids, "attention_mask": mask}, several)
    assert (int(given), int(made)) == (2, 2)
    output = type("O", (), {"sequences": several})()
    assert int(count_tokens(decoder, (ids,), {}, output)[1]) == 2
    both = count_tokens(
        decoder, (), {"inputs_embeds": torch.zeros(2, 3, 4)}, torch.tensor([[9, 1]])
    )
    assert (int(both[0]), int(both[1])) == (6, 2)
    t5 = _Model(0, 1, encoder_decoder=True)
    assert int(count_tokens(t5, (ids,), {}, torch.tensor([[0, 9, 1, 0]]))[1]) == 2
    assert count_tokens(decoder, (ids,), {}, "text") == (2, None)
    sound = count_tokens(t5, (torch.zeros(1, 80),), {}, torch.tensor([[0, 9]]))
    assert (sound[0], int(sound[1])) == (None, 1)


class _Streamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: Any) -> None:
        self.got.append(value)

    def end(self) -> None:
        self.got.append("end")


def test_a_streamer_is_counted_as_it_goes(model: Any, recording: Any) -> None:  # noqa: ARG001
    """Tokens and the time of the first one, with the streamer in a thread of its own."""
    streamer = _Streamer()
    ids = torch.tensor([[5, 6, 7]])

    def run() -> None:
        model.generate(ids, streamer=streamer, max_new_tokens=4, min_new_tokens=4)

    with ci.request():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert (len(streamer.got), streamer.got[-1]) == (6, "end")
    rows = recorded()
    marks = marks_of(rows, "generate")
    assert (marks["input_tokens"], marks["output_tokens"]) == (3, 4)
    assert float(marks["time_to_first_token_ms"]) > 0
    attrs = rows.one("request").attrs
    assert attrs["gen_ai.usage.output_tokens"] == 4
    assert attrs["gen_ai.response.time_to_first_chunk"] > 0


def test_what_generate_raises_is_the_users(model: Any, recording: Any) -> None:  # noqa: ARG001
    """An error flies on and is on the scope; nothing is counted."""
    with ci.request(), pytest.raises(ValueError, match="max_new_tokens") as caught:
        model.generate(IDS, attention_mask=MASK, max_new_tokens=-1)
    rows = recorded()
    assert "ValueError" in str(rows.one("generate").attrs["error"])
    assert caught.value.__traceback__ is not None
    assert "output_tokens" not in marks_of(rows, "request")


def test_results_and_random_numbers_are_the_same(model: Any) -> None:
    """With the hook a sampled answer is the one without it, bit for bit."""

    def answer() -> torch.Tensor:
        torch.manual_seed(7)
        return model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=True)

    without = answer()
    original = vars(GenerationMixin)["generate"]
    ci.profile(frameworks=["transformers"])
    assert vars(GenerationMixin)["generate"] is not original
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(original)
    assert torch.equal(answer(), without)
    ci.shutdown()
    assert vars(GenerationMixin)["generate"] is original
    assert torch.equal(answer(), without)


def test_transformers_is_hooked_when_it_comes_and_never_imported(run_program: RunProgram) -> None:
    """profile() and a decorator do not load it; the hook comes with its first import."""
    run: ProgramRun = run_program(
        """
        import sys
        import cirron_otel as ci

        ci.profile()

        @ci.inference
        def answer(model, ids):
            return model.generate(ids, max_new_tokens=3, min_new_tokens=3)

        assert not any(name.partition(".")[0] == "transformers" for name in sys.modules)
        import torch, transformers
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=2,
            eos_token_id=1, pad_token_id=0)
        answer(transformers.GPT2LMHeadModel(config), torch.tensor([[5, 6]]))
        """,
        env={"HF_HUB_OFFLINE": "1"},
        measured=False,
        timeout=120,
    )
    assert tree_text(run, without={"forward"}) == "cirron.session\n  request\n    generate"
    assert run.one("request").attrs["gen_ai.usage.output_tokens"] == 3
