"""`pareto.html`: the Pareto picture alone, with the policy of the mark that is pointed at."""

from kvsearch.report.pareto_plot import Picture

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvsearch: loss against memory, {{ info.model }}</title>
<style>
body { margin: 0 auto; max-width: 110rem; padding: 0 1rem; background: #fff; color: #1c2530;
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.2rem; margin: 1rem 0 .3rem; }
p { margin: 0 0 .4rem; max-width: 60rem; }
svg { display: block; width: 100%; height: auto; }
#shown { position: sticky; bottom: 0; min-height: 8.5rem; padding: .5rem 0; background: #fff;
  border-top: 1px solid #d9dee3; }
details { overflow-wrap: anywhere; }
code { font: .88em ui-monospace, monospace; }
</style></head><body>
<h1>KV-cache policies for {{ info.model }}: loss against memory</h1>
<p>Each mark is one policy, measured on the report {{ info.words.material }} {{ info.report_text }}
(n = {{ info.tokens }} {{ info.words.count }}). {{ info.placed }} Lower is less loss, further left
is less memory. Point at a mark, or click it, to read its policy.</p>
{{ svg | safe }}
<div id="shown" aria-live="polite"></div>
<h2>Policies of the report, then trials of the search</h2>
{% for p in info.points + info.trials %}
<details id="{{ p.anchor }}"><summary>{{ p.details[0] }}</summary>
{% for line in p.details[1:-1] %}{{ line }}<br>
{% endfor %}<code>{{ p.details[-1] }}</code></details>
{% endfor %}
<script>
for (const mark of document.querySelectorAll("svg a")) {
  const found = document.querySelector(mark.getAttribute("xlink:href")).cloneNode(true);
  found.removeAttribute("id");
  found.open = true;
  const show = () => document.getElementById("shown").replaceChildren(found);
  mark.addEventListener("pointerenter", show);
  mark.addEventListener("focus", show);
  mark.addEventListener("click", (e) => { e.preventDefault(); show(); });
}
</script></body></html>
"""


def pareto_page(info: Picture, svg: str) -> str:
    """A whole page that loads nothing from anywhere; without scripts a mark leads to its policy.

    Args:
        info: what is drawn.
        svg: the picture, wide.
    """
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)
    return page.render(info=info, svg=svg)
