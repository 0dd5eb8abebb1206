"""Rendering and loss masks follow the tokenizer's own template; nothing is guessed."""

from __future__ import annotations

from typing import Any

import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.targets.chat import ChatTokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

# A template that hides the reasoning of earlier turns and opens an empty block when thinking is off, as Qwen3 does.
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last and '</t>' in message['content'] %}"
    "{{ message['content'].split('</t>')[1] }}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not thinking %}{{ '<t></t>' }}{% endif %}{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def chat(text: str | None = CHAT_TEMPLATE, **options: Any) -> ChatTokenizer:
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = text
    return ChatTokenizer(tokenizer, name="tiny", vocab_size=300, **options)


def supervised_text(chat: ChatTokenizer, rendered: Any) -> str:
    marked = [token for token, mask in zip(rendered.tokens, rendered.mask) if mask]
    return chat.decode(marked, skip_special_tokens=False)


def test_every_assistant_turn_is_supervised_up_to_its_end_of_turn() -> None:
    (rendered,) = chat().supervised_spans(CONVERSATION)
    assert len(rendered.tokens) == len(rendered.mask)
    assert supervised_text(chat(), rendered) == "It is four.<|im_end|>Yes.<|im_end|>"
    # The newline after the last end of turn is not part of the sequence, the one between turns is not supervised.
    assert rendered.tokens == chat().encode(chat().render_text(CONVERSATION, False).rstrip("\n"))


def test_each_prompt_is_what_serving_would_send() -> None:
    (rendered,) = chat().supervised_spans(CONVERSATION)
    for turn in (1, 3):
        prompt = chat().render(CONVERSATION[:turn])
        assert rendered.tokens[: len(prompt)] == prompt
        assert not rendered.mask[len(prompt) - 1] and rendered.mask[len(prompt)]


def test_a_template_that_rewrites_earlier_turns_gives_one_sequence_per_turn() -> None:
    conversation = [dict(message) for message in CONVERSATION]
    conversation[1]["content"] = "<t>hm, well</t>It is four."
    thinking = chat(THINKING_TEMPLATE, template_options={"thinking": True})
    first, second = thinking.supervised_spans(conversation)
    assert supervised_text(thinking, first) == "<t>hm, well</t>It is four.<|im_end|>"
    assert supervised_text(thinking, second) == "Yes.<|im_end|>"
    assert second.tokens[: second.mask.index(True)] == thinking.render(conversation[:3])
    assert "hm" not in thinking.decode(second.tokens)


def test_an_answer_stands_behind_the_prompt_that_serving_opens() -> None:
    """With thinking off the generation prompt holds an empty block that a finished turn does not show."""
    off = chat(THINKING_TEMPLATE, template_options={"thinking": False})
    (rendered,) = off.supervised_spans(CONVERSATION[:2])
    assert off.decode(rendered.tokens).endswith("<t></t>It is four.")
    assert supervised_text(off, rendered) == "It is four.<|im_end|>"


def test_the_plain_template_only_if_asked() -> None:
    with pytest.raises(UserError, match=r"no chat template.*target\.template=plain"):
        chat(None)
    plain = chat(None, template="plain")
    (rendered,) = plain.supervised_spans(CONVERSATION)
    assert plain.render_text(CONVERSATION[:1]) == "User: What is two and two?\nAssistant: "
    assert supervised_text(plain, rendered) == "It is four.<|im_end|>Yes.<|im_end|>"


def test_a_template_that_raises_is_an_error_with_its_words() -> None:
    broken = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
    )
    refusing = chat(broken)
    with pytest.raises(UserError, match=r"roles \['system', 'user'\].*no system role"):
        refusing.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])


def test_a_conversation_without_an_answer_is_refused() -> None:
    with pytest.raises(UserError, match="assistant"):
        chat().supervised_spans(CONVERSATION[:1])


def test_template_text_options_and_system_prompt_are_part_of_the_identity() -> None:
    hashes = {
        chat().template_hash,
        chat(template_options={"thinking": True}).template_hash,
        chat(system_prompt="Be brief.").template_hash,
        chat(THINKING_TEMPLATE).template_hash,
    }
    assert len(hashes) == 4
    assert chat().template_hash == chat().template_hash
    assert chat().tokenizer_hash == chat(THINKING_TEMPLATE).tokenizer_hash


def test_the_system_prompt_comes_first_unless_the_conversation_has_one() -> None:
    briefly = chat(system_prompt="Be brief.")
    assert briefly.render_text(CONVERSATION[:1]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = [{"role": "system", "content": "Be long."}, *CONVERSATION[:1]]
    assert "Be brief." not in briefly.render_text(own)


def test_end_tokens_come_from_configuration_tokenizer_and_template() -> None:
    assert chat(eos_ids=[0, 2]).eos_ids == (0, 2)
    other_end = CHAT_TEMPLATE.replace("<|im_end|>", "<|reserved_0|>")
    assert chat(other_end).eos_ids == (2, 3)


def test_the_mask_token_is_reserved_and_never_used() -> None:
    assert chat().tokenizer.convert_ids_to_tokens(chat().mask_token_id) == "<|reserved_0|>"
    used = CHAT_TEMPLATE.replace("<|im_end|>", "<|reserved_0|>")
    assert chat(used).mask_token_id is None
    tokenizer = tiny_tokenizer()
    roomy = ChatTokenizer(tokenizer, name="tiny", vocab_size=320, template="plain")
    assert roomy.mask_token_id == 3
