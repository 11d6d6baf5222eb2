from fakes import answer_text
def test_a(shared):
    with shared.http() as c:
        r = c.post("/v1/completions", json={"model":"fake","prompt":"hello","max_tokens":20})
        print(r.text); assert r.json()["choices"][0]["text"]==answer_text(5,0,20)
        r = c.post("/v1/chat/completions", json={"model":"fake","messages":[{"role":"user","content":"hi"}],"stream":True,"max_tokens":5,"stream_options":{"include_usage":True}})
        print(r.text); 
        for path in ["/v1/models","/v1/models/alias/of-fake","/v1/models/x","/health","/nope","/version"]:
            print(c.get(path).text)
        print(c.get("/v1/completions").text)
