"""One run or several as one page of HTML, which needs no network.

run folder ──► course (metrics) ──┐
               timeline (trace) ──┼──► page: one JSON document in a template, drawn by the page's own script
               episodes ──────────┘
"""
