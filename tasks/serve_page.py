"""The page of a server: a text box, and what the model makes of it."""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Shardline</title>
<style>
body { font: 16px system-ui; max-width: 48rem; margin: 2rem auto; padding: 0 1rem }
textarea { width: 100%; height: 8rem; font: 14px monospace; box-sizing: border-box }
input { width: 5rem } pre { white-space: pre-wrap } pre b { font-weight: normal; color: #1a56b0 }
</style>
<h1 id="title">Shardline</h1>
<form>
<textarea name="prompt" aria-label="prompt">def </textarea>
<p><label>tokens <input name="new_tokens" type="number" value="64"></label>
<label>temperature <input name="temperature" type="number" step="0.1" value="0.8"></label>
<label>top k <input name="top_k" type="number" value="50"></label>
<label>seed <input name="seed" type="number" value="1337"></label>
<button>Generate</button></p>
</form>
<pre id="text"></pre>
<script>
const title = document.getElementById("title"), text = document.getElementById("text")
fetch("health").then(r => r.json()).then(h => title.textContent = `${h.model} version ${h.version}`)
document.querySelector("form").onsubmit = async event => {
  event.preventDefault()
  const body = Object.fromEntries(new FormData(event.target))
  for (const name in body) if (name != "prompt") body[name] = Number(body[name])
  text.textContent = "…"
  const reply = await fetch("generate", { method: "POST", body: JSON.stringify(body),
    headers: { "content-type": "application/json" } })
  const answer = await reply.json()
  text.textContent = reply.ok ? body.prompt : answer.detail
  if (!reply.ok) return
  title.textContent = `${answer.model} version ${answer.version}`
  text.append(Object.assign(document.createElement("b"), { textContent: answer.text }))
}
</script>
</html>
"""
