"""`kumi doctor --gpu`: one validation of a GPU, whose report a user reads and sends.

    run_parts.validate(out, device)    the parts of `part_table`, each in a process of its own; a JSON file and a page

This file imports nothing: the process of a part shall import only what the part needs.
"""
