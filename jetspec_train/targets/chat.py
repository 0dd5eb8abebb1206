"""Conversations to tokens and back, always through the tokenizer's own chat template.

Serving renders the conversation so far with a generation prompt and lets the model write on. Training data is made in
exactly that way: the prompt is rendered as serving would, what follows it is what the model is supervised on, up to
and including its end of turn. There are no header strings in this file, and a template that raises is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import stable_hash

# Used only with ``target.template=plain``, for tokenizers that have no chat template of their own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_RESERVED = re.compile(r"mask|reserved|unused|placeholder|extra_id|dummy", re.IGNORECASE)

Message = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """One training sequence.

    Attributes:
        tokens: token ids.
        mask: same length; True where the token is the assistant's own and supervised.
    """

    tokens: list[int]
    mask: list[bool]


class ChatTokenizer:
    """A tokenizer with its template and the options that every rendering uses.

    Attributes:
        eos_ids: every token id that ends an answer.
        pad_id: what fills unused places; never attended to.
        mask_token_id: a reserved id that answers never contain, for the masked slots of a draft block; None if the
            vocabulary has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        vocab_size: int,
        template: str = "tokenizer",
        template_options: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.vocab_size = vocab_size
        self.template_options = dict(template_options or {})
        self.system_prompt = system_prompt
        self.template_text = self._choose_template(template)
        ends = [*eos_ids, tokenizer.eos_token_id, self._end_of_turn()]
        self.eos_ids: tuple[int, ...] = tuple(sorted({int(end) for end in ends if end is not None}))
        if not self.eos_ids:
            raise UserError(f"target {name!r}: neither its configuration nor its tokenizer names an end-of-text token.")
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else self.eos_ids[0]
        self.mask_token_id: int | None = self._reserved_token()

    # -- rendering ----------------------------------------------------------------------------------------------

    def render_text(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text; ``system_prompt`` is put first unless the conversation has its own."""
        conversation = [dict(message) for message in messages]
        if self.system_prompt is not None and not (conversation and conversation[0].get("role") == "system"):
            conversation.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                chat_template=self.template_text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_options,
            )
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise UserError(
                f"the chat template of target {self.name!r} refuses a conversation with roles {roles} "
                f"(options {self.template_options}): {error}"
            ) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the conversation, as serving would send it to the model."""
        return self.encode(self.render_text(messages, add_generation_prompt))

    def supervised_spans(self, messages: Sequence[Message]) -> list[Rendered]:
        """Training sequences of a finished conversation, with the assistant's tokens marked.

        One sequence for all turns if each turn's prompt, rendered as serving would, continues the text before it;
        else (templates that rewrite earlier turns, such as those of thinking models) one sequence per assistant turn.
        The end-of-turn token is supervised, what the template writes after it is not.

        Raises:
            UserError: the conversation has no assistant turn, or the template does not show its answer.
        """
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise UserError("a conversation without an assistant turn has nothing to learn from")
        singles = [self._one_turn(messages, turn) for turn in turns]
        if len(singles) == 1:
            return singles
        tokens, mask = list(singles[0].tokens), list(singles[0].mask)
        for turn, single in zip(turns[1:], singles[1:]):
            prompt = self.render(messages[:turn])
            if prompt[: len(tokens)] != tokens:
                return singles
            mask += [False] * (len(prompt) - len(tokens)) + single.mask[len(prompt) :]
            tokens = list(single.tokens)
        return [Rendered(tokens, mask)]

    def _one_turn(self, messages: Sequence[Message], turn: int) -> Rendered:
        prompt_text = self.render_text(messages[:turn], add_generation_prompt=True)
        full_text = self.render_text(messages[: turn + 1], add_generation_prompt=False)
        if full_text.startswith(prompt_text):
            answer_text = full_text[len(prompt_text) :]
        else:
            # The finished turn is written differently from the opened one (an empty reasoning block, for instance).
            # Serving shows the opened one, so the answer is put behind that.
            content = str(messages[turn]["content"]).strip()
            at = full_text.rfind(content)
            if at < 0 or not content:
                raise UserError(f"the chat template of target {self.name!r} does not show the assistant's answer")
            answer_text = full_text[at:]
        prompt, answer = self.encode(prompt_text), self.encode(answer_text)
        ends = [index for index, token in enumerate(answer) if token in self.eos_ids]
        answer = answer[: ends[-1] + 1] if ends else self.encode(answer_text.rstrip())
        return Rendered(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    # -- tokens and text ----------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added (templates write their own first token)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    # -- identity -----------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer_hash(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return hashlib.sha256(backend.to_str().encode()).hexdigest()
        return stable_hash(self.tokenizer.get_vocab())

    @property
    def template_hash(self) -> str:
        return stable_hash(
            {"template": self.template_text, "options": self.template_options, "system": self.system_prompt}
        )

    # -- details ------------------------------------------------------------------------------------------------

    def _choose_template(self, template: str) -> str:
        if template == "plain":
            return PLAIN_TEMPLATE
        if template != "tokenizer":
            raise UserError(f"target.template is {template!r}; allowed: tokenizer, plain")
        own = self.tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if not own:
            raise UserError(
                f"the tokenizer of target {self.name!r} has no chat template. Choose an instruction-tuned target, or "
                "say target.template=plain to use plain 'User: ... / Assistant: ...' text."
            )
        return own

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes behind an answer, if it writes one."""
        probe = "ok"
        text = self.render_text([{"role": "user", "content": probe}, {"role": "assistant", "content": probe}], False)
        tail = self.encode(text[text.rfind(probe) + len(probe) :])
        specials = set(self.tokenizer.all_special_ids) | {
            index for index, token in self._added_tokens.items() if token.special
        }
        return tail[0] if tail and tail[0] in specials else None

    @property
    def _added_tokens(self) -> dict[int, Any]:
        return getattr(self.tokenizer, "added_tokens_decoder", {}) or {}

    def _reserved_token(self) -> int | None:
        """Preferred: a token named as reserved; then an id beyond the tokenizer; then a special token without use."""
        used = {*self.eos_ids, self.pad_id, self.tokenizer.bos_token_id, self.tokenizer.unk_token_id}
        spare = [
            (index, str(token.content))
            for index, token in sorted(self._added_tokens.items())
            if token.special
            and index not in used
            and index < self.vocab_size
            # Part of the template's text, or of a token's text in it: the model reads or writes it.
            and str(token.content) not in self.template_text
        ]
        named = [index for index, content in spare if _RESERVED.search(content)]
        if named:
            return named[0]
        highest = max([*self._added_tokens, len(self.tokenizer) - 1])
        if highest + 1 < self.vocab_size:
            return highest + 1
        return spare[-1][0] if spare else None
