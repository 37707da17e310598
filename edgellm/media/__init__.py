"""What prompts show beside text, through the encoders of the model."""
