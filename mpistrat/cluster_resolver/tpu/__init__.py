"""The slice of TPU chips that this process is part of."""
