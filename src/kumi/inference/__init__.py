"""Text from models: a model's folder opened with its tokenizer, and tokens decoded from it."""
