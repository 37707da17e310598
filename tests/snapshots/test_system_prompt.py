"""Which tokens of a rendered conversation belong to the system prompt, whatever the template does."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.errors import RequestError, TemplateError
from edgellm.snapshots.system_prompt import system_prompt_ids
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tiny_engines: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_engines)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    tokenizer.chat_template = ChatTemplate({"default": template}, "a test")
    return tokenizer


def test_everything_before_the_users_words_is_kept(tokenizer: Tokenizer) -> None:
    ids = system_prompt_ids(tokenizer, "You are a robot.")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>system\nYou are a robot.<|im_end|>\n<|im_start|>user\n"
    asked = [{"role": "system", "content": "You are a robot."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.encode_chat(asked)[: len(ids)] == ids


def test_a_template_may_move_the_system_prompt_into_the_first_question(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, "[{{ messages[0].content }}] {{ messages[1].content }} ANSWER")
    assert tokenizer.decode(system_prompt_ids(tokenizer, "Be brief.")) == "[Be brief.] "


def test_a_template_that_begins_with_the_users_words_shares_nothing(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, "{{ messages[1].content }} {{ messages[0].content }}")
    with pytest.raises(RequestError, match="user's words before everything else"):
        system_prompt_ids(tokenizer, "Be brief.")


def test_a_template_that_refuses_system_prompts_is_quoted(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, "{{ raise_exception('no system role here') }}")
    with pytest.raises(TemplateError, match="no system role here"):
        system_prompt_ids(tokenizer, "Be brief.")
