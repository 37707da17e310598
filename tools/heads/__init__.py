"""Draft heads for models that have none: prompts, answers of the model's own, training, and a foreign drafter."""
