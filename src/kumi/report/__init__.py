"""The report of a plan: in the terminal, as an HTML page, as SVG pictures and as a Chrome trace.

planning.plan(job, pinned) -> Report      search the layouts and collect everything that explains the choice
terminal.render, page.page, pictures.pictures, trace.trace      render a Report for people and programs
"""
