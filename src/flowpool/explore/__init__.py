"""The page to play with: a small server on this machine and one static page.

The page asks, the server computes with the same functions that everybody calls. One module per view of the page:
:mod:`play`, :mod:`graphs`, :mod:`compare` and :mod:`runs`; each answers a JSON object with a JSON object and knows
nothing of the web. :mod:`fields` reads what the page sends, :mod:`server` guards the door.
"""
