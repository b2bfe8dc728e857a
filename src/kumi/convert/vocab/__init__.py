"""Extend a model's vocabulary, to train it on in another language or domain.

extend            the entire operation
base_tokenizer    the tokenizer to extend
requested_tokens  tokens that a user names
corpus            texts to learn from and to measure on, their words, and a tokenizer's fertility
learn             tokens from texts: the continuation of BPE training
edit              the files of the tokenizer
rows              rows of the embeddings and the head
extension_report  the result
"""

from kumi.convert.vocab.extend import INITS, Request, extend
from kumi.convert.vocab.extension_report import report_lines

__all__ = ["INITS", "Request", "extend", "report_lines"]
