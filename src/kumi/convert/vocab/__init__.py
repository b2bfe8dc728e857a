"""Extend a model's vocabulary, to train it on in another language or domain.

base    the tokenizer to extend               wanted  tokens that a user names
corpus  texts, words and fertility            learn   tokens from texts: BPE training, continued
edit    the tokenizer's files                 rows    rows of embeddings and head
extend  the entire operation                  report  its result
"""

from kumi.convert.vocab.extend import INITS, Request, extend
from kumi.convert.vocab.extension_report import report_lines

__all__ = ["INITS", "Request", "extend", "report_lines"]
