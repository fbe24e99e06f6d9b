"""A tokenizer with one token per character."""

from types import SimpleNamespace


class Tokenizer:
    @classmethod
    def from_file(cls, path):
        return cls()

    def encode(self, text):
        return SimpleNamespace(ids=[ord(character) for character in text])
