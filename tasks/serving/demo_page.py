"""The page of a server: a text box, and what the champion and the version before it make of it, side by side."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Shardline</title>
<style>
body { font: 16px system-ui; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430 }
h1 { font-size: 1.4rem } h2 { font-size: 1rem; margin: 0 }
textarea { width: 100%; height: 7rem; font: 14px monospace; box-sizing: border-box }
input[type=number] { width: 5rem } label { margin-right: .8rem; white-space: nowrap }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
@media (max-width: 48rem) { main { grid-template-columns: 1fr } }
section { border: 1px solid #ccd3dc; border-radius: 6px; padding: .8rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 6rem } pre b { font-weight: normal; color: #1a56b0 }
small { color: #5b6675 } .wrong { color: #a02020 }
</style>
<h1 id="title">Shardline</h1>
<form>
<textarea name="prompt" aria-label="prompt">def </textarea>
<p><label>tokens <input name="new_tokens" type="number" value="64"></label>
<label>temperature <input name="temperature" type="number" step="0.1" value="0.8"></label>
<label>top k <input name="top_k" type="number" value="50"></label>
<label>top p <input name="top_p" type="number" step="0.05" value="1"></label>
<label>seed <input name="seed" type="number" value="1337"></label>
<label><input name="both" type="checkbox" checked> and the previous version</label>
<label id="token" hidden>token <input name="token" type="password" autocomplete="off"></label>
<button>Generate</button></p>
</form>
<main>
<section id="current"><h2>Served now</h2><small></small><pre></pre></section>
<section id="previous"><h2>Previous version</h2><small></small><pre></pre></section>
</main>
<script>
const form = document.querySelector("form")
const numbers = ["new_tokens", "temperature", "top_k", "top_p", "seed"]
fetch("health").then(r => r.json()).then(h => document.getElementById("title").textContent = `${h.model} (${h.ref})`)

async function ask(column, path, body, token) {
  const said = column.querySelector("small"), text = column.querySelector("pre"), began = performance.now()
  said.textContent = "…"
  said.className = text.textContent = ""
  const headers = { "content-type": "application/json", ...token && { authorization: `Bearer ${token}` } }
  try {
    const reply = await fetch(path, { method: "POST", body: JSON.stringify(body), headers })
    const answer = await reply.json()
    if (reply.status == 401) document.getElementById("token").hidden = false
    if (!reply.ok) throw new Error(answer.detail)
    const here = (performance.now() - began).toFixed(0), there = (answer.seconds * 1000).toFixed(0)
    said.textContent = `version ${answer.version}, ${there} ms (${here} ms with the way)`
    text.append(body.prompt, Object.assign(document.createElement("b"), { textContent: answer.text }))
  } catch (error) {
    said.className = "wrong"
    said.textContent = error.message
  }
}

form.onsubmit = async event => {
  event.preventDefault()
  const given = new FormData(form), body = { prompt: given.get("prompt") }
  for (const name of numbers) body[name] = Number(given.get(name))
  const previous = document.getElementById("previous")
  previous.hidden = !given.get("both")
  // One after the other: side by side each would make the other look slow.
  await ask(document.getElementById("current"), "generate", body, given.get("token"))
  if (given.get("both")) await ask(previous, "previous/generate", body, given.get("token"))
}
</script>
</html>
"""
