"""What is said of a plan: the report in the terminal, on a page, in pictures, as a trace and in words.

planning.plan(job, pinned) -> Report      the search, and what explains its result
terminal.render, page.page, pictures.pictures, trace.trace      the same for people and programs
"""
