"""From a policy and a text to measures: quality, sensitivity, decode speed.

The package can be called: `kvsearch.evaluate(policies, model, text)` is
`kvsearch.app.evaluate.evaluate`.
"""
