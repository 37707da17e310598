"""What a change of a model costs, as quantizing does: what `edgellm eval` measures, for programs."""

from edgellm.evaluation.inputs import Example as Example
from edgellm.evaluation.inputs import Window as Window
from edgellm.evaluation.inputs import answer_windows as answer_windows
from edgellm.evaluation.inputs import bos_token as bos_token
from edgellm.evaluation.inputs import load_examples as load_examples
from edgellm.evaluation.inputs import text_windows as text_windows
from edgellm.evaluation.measures import Difference as Difference
from edgellm.evaluation.measures import Divergence as Divergence
from edgellm.evaluation.measures import Perplexity as Perplexity
from edgellm.evaluation.measures import RecordedLogits as RecordedLogits
from edgellm.evaluation.measures import answers as answers
from edgellm.evaluation.measures import divergence as divergence
from edgellm.evaluation.measures import exact_match as exact_match
from edgellm.evaluation.measures import perplexity as perplexity
from edgellm.evaluation.measures import record_logits as record_logits
from edgellm.evaluation.measures import rouge as rouge
