"""Programs that make the small language model shipped with EdgeLLM: data, vocabulary, training, export, evaluation."""
