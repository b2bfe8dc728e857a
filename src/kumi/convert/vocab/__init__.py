"""Larger vocabularies, for training on in another language or domain.

base    the tokenizer that is extended        wanted  tokens that a user names
corpus  texts, words and fertility            learn   tokens from texts: the old merging, continued
edit    new tokens in the tokenizer's files   rows    their rows in embeddings and head
extend  all of it, into a new folder          report  what was done
"""

from kumi.convert.vocab.extend import INITS, Request, extend
from kumi.convert.vocab.report import lines

__all__ = ["INITS", "Request", "extend", "lines"]
