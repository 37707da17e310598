"""What a change of a model costs, as quantizing does: what `edgellm eval` measures, for programs."""

from edgellm.evaluation.measures import divergence as divergence
from edgellm.evaluation.measures import exact_match as exact_match
from edgellm.evaluation.measures import perplexity as perplexity
from edgellm.evaluation.measures import rouge as rouge
