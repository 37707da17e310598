"""The calls of requests to one model: its format, the reader of an answer, and the rules that it is decoded under."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.errors import RequestError
from edgellm.structure.description import Structure
from edgellm.structure.reasoning import begins_message, harmony_ids, reasoning_marks, reasoning_state
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.formats import HARMONY, ToolFormat, taught_format, tool_format
from edgellm.tool_calls.harmony import HarmonyReader, harmony_constraint
from edgellm.tool_calls.reader import ToolReader
from edgellm.tool_calls.rules import call_constraint
from edgellm.tool_calls.values import is_object

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary
    from edgellm.text.template import ChatTemplate
    from edgellm.text.tokenizer import Tokenizer


logger = logging.getLogger("edgellm.tool_calls")


#: Makes the rules of an answer, of what makes its model's vocabulary; None where calls are read as they come.
RulesOfCalls = Callable[[Callable[[], "GrammarVocabulary"]], TokenConstraint | None]


class ToolCalling:
    """Knows in which format a model calls. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, recorded: str | None = None) -> None:
        """`recorded` is the format that the engine directory names: that of its own chat template, and of another one
        that teaches none. RequestError for an unknown one."""
        self._tokenizer = tokenizer
        self._own_template = tokenizer.chat_template
        self._recorded = None if recorded is None else tool_format(recorded)
        tokenizer.write_calls = self.written
        self._known: weakref.WeakKeyDictionary[ChatTemplate, ToolFormat | None] = weakref.WeakKeyDictionary()

    def format(self) -> ToolFormat | None:
        """The format of the chat template that is set; None where none is known."""
        template = self._tokenizer.chat_template
        if template is None or (self._recorded is not None and template is self._own_template):
            return self._recorded
        if template not in self._known:
            self._known[template] = taught_format(
                template, lambda token: self._tokenizer.token_to_id(token) is not None
            )
        return self._known[template] or self._recorded

    def written(self, calls: Sequence[Any]) -> str:
        """The calls of an earlier message as the model writes them; "" where its format is not known."""
        found = self.format()
        functions = [call.get("function", call) for call in calls]
        named = [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]
        return "" if found is None else found.written([(each["name"], _arguments(each)) for each in named])

    def calling(
        self,
        choice: ToolChoice | None,
        prompt_ids: Sequence[int],
        continued: str | None = None,
        structure: Structure | None = None,
    ) -> tuple[ToolReader | HarmonyReader, RulesOfCalls | None] | tuple[None, None]:
        """The reader of the answer to a prompt, and what makes its rules; None where no call is to be read of it, and
        the model does not write in channels. `continued` is the text of the message that the model goes on with; an
        answer that calls nothing has the `structure`. Raises RequestError where a call is required of a model whose
        template teaches none."""
        calls = choice is not None and choice.mode != "none"
        ids = harmony_ids(self._tokenizer)
        if ids is not None and (continued is not None or begins_message(self._tokenizer, ids, prompt_ids)):
            if calls and structure is not None:
                raise RequestError("this model writes calls and text in channels: ask for a structure, or for tools")
            reader = HarmonyReader(choice.schemas if choice and calls else {}, ids, in_text=continued is not None)
            if choice is None or not calls:
                return reader, None
            return reader, partial(
                _constraint, lambda tokens: harmony_constraint(choice, tokens, ids), choice.mode == "required"
            )
        if choice is None or not calls:
            return None, None
        found = self.format()
        if found is None or found is HARMONY:  # whose tokens are not there, or whose prompt ends elsewhere
            if choice.mode == "required":
                raise RequestError(
                    f"tool_choice requires a call, but the chat template of {self._tokenizer.template_origin} shows "
                    "no form of calls that is known: ask with tool_choice 'auto', or build with --tool-format"
                )
            return None, None
        known = ((mark, self._tokenizer.token_to_id(mark)) for mark in found.marks)
        own_ids = {mark: token_id for mark, token_id in known if token_id is not None}
        hidden = self._tokenizer.special_token_ids.intersection(own_ids.values())
        marks = reasoning_marks(self._tokenizer)
        state = reasoning_state(self._tokenizer, marks, prompt_ids, continued)
        own = ToolReader(found, choice.schemas, marks, state, hidden, structure is not None)

        def make(tokens: GrammarVocabulary) -> TokenConstraint:
            return call_constraint(found, choice, tokens, own_ids, structure)

        return own, partial(_constraint, make, choice.mode == "required" or structure is not None)


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    if isinstance(given, str) and is_object(given):
        given = parsed_json(given)
    return given if isinstance(given, dict) else {}


def _constraint(
    make: Callable[[GrammarVocabulary], TokenConstraint], is_needed: bool, vocabulary: Callable[[], GrammarVocabulary]
) -> TokenConstraint | None:
    """The rules; None where a model may call or not, and grammars cannot read its tokenizer."""
    try:
        tokens = vocabulary()
    except RequestError as error:
        if is_needed:
            raise
        logger.warning("calls of tools are not enforced: %s", error)
        return None
    return make(tokens)
