"""Scripts and frameworks that this project did not write, each run plain, under a clock of its own, and under headway.

`rows.py` lists them, `measure.py` runs one, `site/` holds the clock, `jobs/` the quick-start scripts of the
frameworks, `standins/` small modules in place of packages that cannot be had (or would download data), `data.py` the
made-up data sets, `page.py` writes docs/compatibility.md.
"""
