"""The report of a plan: in the terminal, as an HTML page, as SVG pictures and as a Chrome trace.

terminal.render_brief, terminal.render_report   print a Report (see `kumi.plan.session`) in short and in full
page.page, pictures.pictures, trace.trace       write a Report as a page, pictures and a timeline
run_description, rank_placement                 describe a run and the placement of its ranks
"""
