"""The report of a plan: in the terminal, as an HTML page, as SVG pictures and as a Chrome trace.

terminal.render_report, page.page, pictures.pictures, trace.trace   render a Report (see `kumi.plan.session`)
run_description, rank_placement                                     describe a run and the placement of its ranks
"""
