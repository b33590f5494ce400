"""The tokens of an atlas as a table of HTML that can be searched and sorted; it needs nothing from elsewhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.sinks.repetition.atlas import SinkAtlas

_SHOWN = 200  # rows on the page at a time: a browser is slow with a hundred thousand

# Texts go in by textContent and never become HTML.
_SCRIPT = """
(()=>{
const box=document.currentScript.parentElement, data=JSON.parse(box.querySelector('script[type]').textContent);
const body=box.querySelector('tbody'), find=box.querySelector('input[type=search]'), count=box.querySelector('output');
const only=box.querySelector('input[type=checkbox]');
let column=2, up=true;
const show=v=>v===null?'\\u2013':typeof v==='string'?JSON.stringify(v):String(v);
const order=(a,b)=>a[column]===null?(b[column]===null?0:1):b[column]===null?-1:
  (a[column]<b[column]?-1:a[column]>b[column]?1:0)*(up?1:-1);
const draw=()=>{
 const want=find.value.toLowerCase();
 const hits=data.filter(r=>(!only.checked||r[2]===null)&&
   (!want||r[1].toLowerCase().includes(want)||String(r[0])===want)).sort(order);
 body.replaceChildren(...hits.slice(0,SHOWN).map(r=>{
  const tr=document.createElement('tr');
  for(const v of r){const td=document.createElement('td');td.textContent=show(v);tr.append(td);}
  return tr;}));
 count.textContent=hits.length+' tokens'+(hits.length>SHOWN?', the first SHOWN shown':'');
};
find.oninput=only.onchange=draw;
box.querySelectorAll('th').forEach((th,i)=>{th.style.cursor='pointer';
 th.onclick=()=>{up=column===i?!up:true;column=i;draw();};});
draw();
})();
""".replace("SHOWN", str(_SHOWN))


def table(atlas: SinkAtlas) -> str:
    """The table as a piece of HTML; "" without tokens."""
    rows = [list(row.values()) for row in atlas.rows()]
    if not rows:
        return ""
    # "<" as an escape of JSON: no token can end the script or begin a comment in it.
    data = json.dumps(rows, allow_nan=False).replace("<", "\\u003c")
    names = ("id", "token", "repeats", "largest norm", "in the text", "embedding norm", "head")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        '<div class="sinkscope"><p><input type="search" placeholder="search a token or an id" size="30"> '
        '<label><input type="checkbox"> only those that resist</label> <output></output></p>'
        f"<table><thead><tr>{head}</tr></thead><tbody></tbody></table>"
        f'<script type="application/json">{data}</script><script>{_SCRIPT}</script></div>'
    )
