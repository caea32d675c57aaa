//! `rlhf serve` as programs use it, with plain HTTP.

mod tools;

use crate::cli::{Ran, Scratch, json_lines};
use rlhf::tokenizer::Tokenizer;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A running server.
struct Server {
    child: Option<Child>,
    /// `127.0.0.1:PORT`.
    address: String,
}

/// A response.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    /// Reads what is left of a connection.
    fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.contains("transfer-encoding: chunked") { unchunked(body) } else { body.to_string() };
        Self { status, head: head.to_string(), body }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The data of the events of a stream.
    fn events(&self) -> Vec<&str> {
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }

    /// The objects of a stream, which ends as OpenAI's do.
    fn chunks(&self) -> Vec<Value> {
        let events = self.events();
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(*last, "[DONE]");
        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }
}

fn unchunked(body: &str) -> String {
    let (mut rest, mut text) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text += &after[..size];
        rest = &after[size + 2..];
    }
    text
}

impl Server {
    fn start(scratch: &Scratch) -> Self {
        let mut child =
            scratch.command("serve policy --port 0").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("policy is served at http://").and_then(|line| line.strip_suffix("/v1\n"));
        let address = address.unwrap_or_else(|| panic!("{line:?}")).to_string();
        Self { child: Some(child), address }
    }

    fn open(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let host = if headers.contains("Host: ") { String::new() } else { format!("Host: {}\r\n", self.address) };
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    fn get(&self, path: &str) -> Answer {
        Answer::read(self.open("GET", path, "", ""))
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::read(self.open("POST", path, "Content-Type: application/json\r\n", &body.to_string()))
    }

    /// Posts a request for the model; the response is to have no error.
    #[track_caller]
    fn completes(&self, path: &str, mut body: Value) -> Answer {
        body["model"] = "policy".into();
        let answer = self.post(path, &body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        answer
    }

    /// Interrupts the server as Ctrl-C does, and waits for its end.
    fn interrupt(mut self) -> Ran {
        let child = self.child.take().unwrap();
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        Ran::from(child.wait_with_output().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A chat template; its turns end with the model's end of text.
const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";

/// Bytes that are no text may be shown in a stream before others make a character of them.
fn readable(text: &str) -> String {
    text.replace(char::REPLACEMENT_CHARACTER, "")
}

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap().iter();
    choices
        .map(|choice| choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_string())
        .collect()
}

/// Joins the parts of each choice of a stream.
fn joined(chunks: &[Value], choices: usize) -> Vec<(String, Value)> {
    let mut joined = vec![(String::new(), Value::Null); choices];
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let (text, finish) = &mut joined[choice["index"].as_u64().unwrap() as usize];
        assert!(finish.is_null(), "a part after the last: {choice}");
        *text += choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        *finish = choice["finish_reason"].clone();
    }
    joined
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().filter_map(Value::as_f64).collect()
}

#[test]
fn fields_of_a_generation_config_without_effect_are_named_at_the_start() {
    let scratch = Scratch::new();
    scratch
        .write("policy/generation_config.json", r#"{"do_sample": true, "num_beams": 4, "min_length": 9, "top_k": 5}"#);
    let ran = Server::start(&scratch).interrupt();
    let note = "note: policy/generation_config.json: fields without effect here: num_beams, min_length\n";
    assert!(ran.stderr.starts_with(note), "{}", ran.stderr);
}

#[test]
fn completions_are_the_responses_of_generate_and_streams_have_the_same() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    for (flags, settings) in [
        ("--do_sample false", json!({"temperature": 0})),
        ("--seed 7 --num_return_sequences 3", json!({"seed": 7, "n": 3})),
        (
            "--seed 8 --num_return_sequences 2 --temperature 0.9 --top_p 0.9 --top_k 40 --repetition_penalty 1.2",
            json!({"seed": 8, "n": 2, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}),
        ),
    ] {
        let line = format!("generate --model policy --dataset_name prompts.jsonl --max_new_tokens 9 {flags}");
        let rows = json_lines(&scratch.succeeds(&line));
        let mut body = settings.clone();
        body["prompt"] = crate::cli::PROMPTS.to_vec().into();
        body["max_tokens"] = 9.into();
        body["logprobs"] = 0.into();
        let found = server.completes(TEXT, body.clone()).json();
        assert_eq!((&found["object"], &found["model"]), (&json!("text_completion"), &json!("policy")));
        let choices = found["choices"].as_array().unwrap();
        assert_eq!(choices.len(), rows.len());
        let mut tokens = 0;
        for ((index, choice), row) in choices.iter().enumerate().zip(&rows) {
            assert_eq!(
                (&choice["index"], &choice["finish_reason"]),
                (&index.into(), &row["finish_reason"]),
                "{choice}"
            );
            assert_eq!(readable(choice["text"].as_str().unwrap()), readable(row["completion"].as_str().unwrap()));
            let logprobs = numbers(&choice["logprobs"]["token_logprobs"]);
            assert_eq!(logprobs.len() as u64, row["num_tokens"].as_u64().unwrap());
            tokens += logprobs.len();
            if settings.get("temperature").is_none_or(|temperature| *temperature == 0) {
                let pairs = logprobs.iter().zip(numbers(&row["logprobs"]));
                assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 2e-5), "{choice} {row:?}");
            }
        }
        assert_eq!(found["usage"]["completion_tokens"], tokens, "{}", found["usage"]);
        let prompts: usize = rows.iter().map(|row| row["prompt_ids"].as_array().unwrap().len()).sum();
        let n = settings["n"].as_u64().unwrap_or(1) as usize;
        assert_eq!(found["usage"]["prompt_tokens"], prompts / n);

        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let answer = server.completes(TEXT, body);
        let chunks = answer.chunks();
        let (usage, parts) = chunks.split_last().unwrap();
        assert_eq!((&usage["usage"], &usage["choices"]), (&found["usage"], &json!([])));
        let whole = choices
            .iter()
            .map(|choice| (choice["text"].as_str().unwrap().to_string(), choice["finish_reason"].clone()));
        assert_eq!(joined(parts, rows.len()), whole.collect::<Vec<_>>());
        assert!(parts.len() > rows.len() && parts.iter().all(|part| part["id"] == usage["id"]));
    }
    // Without a seed, each request has its own.
    let body = json!({"prompt": "A film", "max_tokens": 20});
    let drawn: Vec<_> = (0..3).map(|_| texts(&server.completes(TEXT, body.clone()).json())).collect();
    assert!(drawn[0] != drawn[1] || drawn[1] != drawn[2], "{drawn:?}");
}

#[test]
fn chats_are_the_responses_of_generate_with_the_chat_template() {
    let scratch = Scratch::new();
    scratch.write("policy/chat_template.jinja", TEMPLATE);
    let server = Server::start(&scratch);
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A film?"}]);
    scratch.write("rows.jsonl", &format!("{}\n", json!({"prompt": messages})));
    let line =
        "generate --model policy --dataset_name rows.jsonl --max_new_tokens 12 --seed 3 --num_return_sequences 2";
    let rows = json_lines(&scratch.succeeds(line));
    let body = json!({"messages": messages, "max_tokens": 12, "seed": 3, "n": 2});
    let found = server.completes(CHAT, body.clone()).json();
    for (choice, row) in found["choices"].as_array().unwrap().iter().zip(&rows) {
        assert_eq!(choice["message"]["role"], "assistant");
        let content = choice["message"]["content"].as_str().unwrap();
        assert_eq!(readable(content), readable(row["completion"].as_str().unwrap()));
        assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&row["finish_reason"], &Value::Null));
    }
    assert_eq!(found["usage"]["prompt_tokens"], rows[0]["prompt_ids"].as_array().unwrap().len());

    let mut body = body;
    body["stream"] = true.into();
    body["logprobs"] = true.into();
    body["top_logprobs"] = 2.into();
    let chunks = server.completes(CHAT, body.clone()).chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
    assert_eq!(joined(&chunks, 2).into_iter().map(|(text, _)| text).collect::<Vec<_>>(), texts(&found));
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let tokens = choices.flat_map(|choice| choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
    let tokens: Vec<Value> = tokens.collect();
    assert_eq!(tokens.len() as u64, found["usage"]["completion_tokens"].as_u64().unwrap());
    for token in &tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert!(top.len() == 2 && top[0]["logprob"].as_f64() >= token["logprob"].as_f64(), "{token}");
    }
    // A model without a template.
    std::fs::remove_file(scratch.path("policy/chat_template.jinja")).unwrap();
    let server = Server::start(&scratch);
    let answer = server.post(CHAT, &json!({"model": "policy", "messages": messages}));
    assert!(answer.status == 400 && answer.body.contains("no chat template"), "{}", answer.body);
}

#[test]
fn an_evaluation_harness_gets_the_log_probabilities_of_a_text() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let tokenizer = Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
    let text = "The movie was a waste of time";
    let ids = tokenizer.encode_prompt(text).unwrap();
    scratch.write("rows.jsonl", &format!("{}\n", json!({"prompt_ids": ids[..1], "completion_ids": ids[1..]})));
    let expected = json_lines(&scratch.succeeds("logprobs --model policy --dataset_name rows.jsonl"));
    let expected = numbers(&expected[0]["logprobs"]);
    for (prompt, max_tokens) in [(json!(text), 0), (json!(ids), 0), (json!([ids, ids]), 1), (json!([text]), 2)] {
        let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": true});
        let found = server.completes(TEXT, body.clone()).json();
        assert_eq!(found["usage"]["completion_tokens"], max_tokens * found["choices"].as_array().unwrap().len());
        for choice in found["choices"].as_array().unwrap() {
            let logprobs = &choice["logprobs"];
            assert!(choice["text"].as_str().unwrap().starts_with(text), "{choice}");
            let lens: Vec<usize> = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
                .map(|name| logprobs[name].as_array().unwrap().len())
                .to_vec();
            assert_eq!(lens, [ids.len() + max_tokens; 4]);
            assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
            let found = numbers(&logprobs["token_logprobs"]);
            let pairs = found.iter().zip(&expected);
            assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 2e-5), "{found:?} {expected:?}");
            for at in 1..lens[0] {
                let top: Vec<f64> =
                    logprobs["top_logprobs"][at].as_object().unwrap().values().map(|x| x.as_f64().unwrap()).collect();
                let best = top.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let chosen = logprobs["token_logprobs"][at].as_f64().unwrap();
                assert!((1..=3).contains(&top.len()) && top.contains(&chosen) && chosen <= best, "{at}: {logprobs}");
                // A greedy token is the likeliest, to the bit.
                assert!(at < ids.len() || chosen == best, "{at}: {logprobs}");
            }
            let tokens: String =
                logprobs["tokens"].as_array().unwrap()[..ids.len()].iter().map(|t| t.as_str().unwrap()).collect();
            assert_eq!(tokens, text);
            let offsets = numbers(&logprobs["text_offset"]);
            assert!(offsets[0] == 0.0 && offsets.is_sorted(), "{offsets:?}");
            if max_tokens > 0 {
                assert_eq!(offsets[ids.len()] as usize, text.chars().count());
            }
        }
        let mut streamed = body;
        streamed["stream"] = true.into();
        let whole: Vec<String> =
            joined(&server.completes(TEXT, streamed).chunks(), found["choices"].as_array().unwrap().len())
                .into_iter()
                .map(|(text, _)| text)
                .collect();
        assert_eq!(whole, texts(&found));
    }
}

#[test]
fn a_text_ends_before_its_stop_string_in_a_stream_too() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let mut body = json!({"prompt": "The movie", "max_tokens": 24, "seed": 5, "logprobs": 0});
    let free = server.completes(TEXT, body.clone()).json();
    let text = texts(&free).remove(0);
    // Two characters from its middle, which may be in two tokens.
    let chars: Vec<char> = text.chars().collect();
    let pairs = chars[chars.len() / 3..].windows(2);
    let stop =
        pairs.map(|pair| pair.iter().collect::<String>()).find(|pair| !pair.contains(char::REPLACEMENT_CHARACTER));
    let stop = stop.unwrap_or_else(|| panic!("no characters in {text:?}"));
    let before = text.split(&stop).next().unwrap();
    for stops in [json!(stop), json!(["not in it", stop])] {
        body["stop"] = stops;
        let found = server.completes(TEXT, body.clone()).json();
        let choice = &found["choices"][0];
        assert_eq!((choice["text"].as_str().unwrap(), &choice["finish_reason"]), (before, &json!("stop")), "{text:?}");
        let tokens = choice["logprobs"]["tokens"].as_array().unwrap().len();
        assert!(tokens < free["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), "{choice}");
        body["stream"] = true.into();
        let chunks = server.completes(TEXT, body.clone()).chunks();
        assert_eq!(joined(&chunks, 1), [(before.to_string(), json!("stop"))]);
        body["stream"] = false.into();
    }
}

#[test]
fn tokens_that_end_a_response_and_a_least_number_of_them_are_those_of_vllm() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let complete = |more: Value| {
        let mut body = json!({"prompt": "The movie", "max_tokens": 8, "temperature": 0, "skip_special_tokens": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer: Value = serde_json::from_str(&server.completes("/v1/completions", body).body).unwrap();
        (answer["usage"]["completion_tokens"].as_u64().unwrap(), answer["choices"][0]["finish_reason"].clone())
    };
    // A model that must go on takes the one that is left.
    let all: Vec<u64> = (0..352).filter(|id| *id != 300).collect();
    assert_eq!(complete(json!({"stop_token_ids": all})), (1, json!("stop")));
    assert_eq!(complete(json!({"stop_token_ids": all, "min_tokens": 8})).0, 8);
    assert_eq!(complete(json!({"ignore_eos": true, "n": 1.0, "stop_token_ids": []})), (8, json!("length")));
    let answer = server.post("/v1/completions", &json!({"model": "policy", "prompt": "a", "stop_token_ids": [352]}));
    assert!(answer.status == 400 && answer.body.contains("stop_token_ids = 352"), "{}", answer.body);
    let answer =
        server.post("/v1/completions", &json!({"model": "policy", "prompt": "a", "max_tokens": 2, "min_tokens": 3}));
    assert!(answer.status == 400 && answer.body.contains("`min_tokens`"), "{}", answer.body);
}

#[test]
fn requests_that_are_refused_are_errors_in_the_form_of_openai() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    for (path, body, status, param, words) in [
        (TEXT, json!({"model": "policy"}), 400, json!("prompt"), "`prompt`: expected a string"),
        (TEXT, json!({"prompt": "a"}), 400, json!("model"), "you must provide a model"),
        (TEXT, json!({"model": "gpt-4", "prompt": "a"}), 404, json!("model"), "`gpt-4` does not exist"),
        (TEXT, json!({"model": "policy", "prompt": "a", "best_of": 3}), 400, json!("best_of"), "not supported"),
        (
            TEXT,
            json!({"model": "policy", "prompt": "a", "temperature": -1}),
            400,
            json!("temperature"),
            "temperature = -1",
        ),
        (TEXT, json!({"model": "policy", "prompt": "a", "top_p": 1.5}), 400, json!("top_p"), "top_p = 1.5"),
        (TEXT, json!({"model": "policy", "prompt": ""}), 400, json!("prompt"), "at least one token"),
        (TEXT, json!({"model": "policy", "prompt": [5, 352]}), 400, json!("prompt"), "token id 352"),
        (
            TEXT,
            json!({"model": "policy", "prompt": "a", "max_tokens": 64}),
            400,
            json!("max_tokens"),
            "context is 64 tokens",
        ),
        (TEXT, json!({"model": "policy", "prompt": vec![5; 64]}), 400, json!("prompt"), "no room for a response"),
        (TEXT, json!({"model": "policy", "prompt": "a", "n": 128, "echo": 1}), 400, json!("echo"), "true or false"),
        (TEXT, json!({"model": "policy", "prompt": vec!["a"; 9], "n": 128}), 400, json!("n"), "at most 1024"),
        (CHAT, json!({"model": "policy", "messages": []}), 400, json!("messages"), "at least one message"),
        (
            CHAT,
            json!({"model": "policy", "messages": [{"role": "user"}]}),
            400,
            json!("messages[0].content"),
            "a string",
        ),
        (CHAT, json!([]), 400, Value::Null, "a JSON object"),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            if let Value::Object(fields) = &mut body {
                fields.insert("stream".into(), stream.into());
            }
            let answer = server.post(path, &body);
            let error = &answer.json()["error"];
            assert_eq!((answer.status, &error["param"]), (status, &param), "{body}: {error}");
            assert!(error["message"].as_str().unwrap().contains(words), "{body}: {error}");
            assert_eq!(error["type"], "invalid_request_error");
        }
    }
    let code = |answer: &Answer| answer.json()["error"]["code"].as_str().unwrap_or_default().to_string();
    assert_eq!(code(&server.post(TEXT, &json!({"model": "x", "prompt": "a"}))), "model_not_found");
    let long = server.post(TEXT, &json!({"model": "policy", "prompt": vec![5; 65]}));
    assert_eq!(code(&long), "context_length_exceeded");
    let answer = Answer::read(server.open("POST", TEXT, "", "{"));
    assert!(answer.status == 400 && answer.body.contains("not JSON"), "{}", answer.body);
    for (answer, status) in [
        (server.get("/v1/nothing"), 404),
        (server.get(TEXT), 405),
        (server.get("/v1/models/gpt-4"), 404),
        (Answer::read(server.open("POST", TEXT, "Content-Length: 99999999\r\nX: ", "")), 413),
    ] {
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].is_string()),
            (status, status == 404 && answer.body.contains("gpt-4"))
        );
    }
    // After all of these the server responds still.
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    let models = server.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][1]), (&json!("policy"), &Value::Null));
    assert_eq!(server.get("/v1/models/policy").json()["object"], "model");
    for name in ["default", "policy"] {
        assert_eq!(server.post(TEXT, &json!({"model": name, "prompt": "a"})).json()["model"], "policy");
    }
}

#[test]
fn a_prompt_of_many_megabytes_is_refused_at_once_and_the_next_client_is_served() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let begun = Instant::now();
    let body = json!({"model": "policy", "prompt": "The film was good. ".repeat(400_000), "max_tokens": 4});
    let answer = server.post(TEXT, &body);
    let error = &answer.json()["error"];
    assert_eq!((answer.status, &error["code"]), (400, &json!("context_length_exceeded")), "{}", answer.body);
    assert!(error["message"].as_str().unwrap().starts_with("the prompt has at least "), "{error}");
    server.completes(TEXT, json!({"prompt": "a", "max_tokens": 1}));
    // Encoding all of it takes ten times as long, and a gigabyte.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
}

#[test]
fn pages_of_other_sites_reach_no_model_on_loopback() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    for headers in ["Host: evil.example\r\n", "Origin: https://evil.example\r\n", "Origin: null\r\n"] {
        let answer = Answer::read(server.open("GET", "/v1/models", headers, ""));
        assert_eq!((answer.status, answer.body.contains("policy")), (403, false), "{headers}: {}", answer.body);
    }
    for headers in ["Host: localhost\r\n", "Origin: http://localhost:3000\r\n"] {
        assert_eq!(Answer::read(server.open("GET", "/v1/models", headers, "")).status, 200, "{headers}");
    }
    // A page of this machine asks before it posts, and may read the response.
    let origin = "Origin: http://localhost:3000\r\n";
    let allowed = "access-control-allow-origin: http://localhost:3000";
    let asked =
        format!("{origin}Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n");
    let asked = Answer::read(server.open("OPTIONS", TEXT, &asked, ""));
    assert!(asked.status == 204 && asked.head.contains(allowed), "{}", asked.head);
    assert!(asked.head.contains("access-control-allow-methods: GET, POST"), "{}", asked.head);
    let body = json!({"model": "policy", "prompt": "a", "max_tokens": 2}).to_string();
    let answer = Answer::read(server.open("POST", TEXT, origin, &body));
    assert!(answer.status == 200 && answer.head.contains(allowed), "{}", answer.head);
    assert!(!server.get("/v1/models").head.contains("access-control"));
}

#[test]
fn a_temperature_near_zero_is_greedy_and_a_top_k_of_minus_one_is_none() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let text = |settings: Value| {
        let mut body = json!({"prompt": "ab", "max_tokens": 8, "seed": 5});
        body.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        server.completes(TEXT, body).json()["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!({"temperature": 1e-9})), text(json!({"temperature": 0})));
    assert_eq!(text(json!({"top_k": -1})), text(json!({"top_k": 0})));
}

#[test]
fn a_client_that_goes_away_ends_its_generation() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let prompt = vec!["a"; 8];
    let mut long = json!({"model": "policy", "prompt": prompt, "n": 128, "max_tokens": 60, "seed": 1});
    let begun = Instant::now();
    server.completes(TEXT, long.clone());
    let whole = begun.elapsed();
    for stream in [true, false] {
        long["stream"] = stream.into();
        let begun = Instant::now();
        let mut client = server.open("POST", TEXT, "Content-Type: application/json\r\n", &long.to_string());
        if stream {
            assert!(client.read(&mut [0; 100]).unwrap() > 0);
        } else {
            std::thread::sleep(whole / 20);
        }
        drop(client);
        server.completes(TEXT, json!({"prompt": "a", "max_tokens": 1}));
        assert!(begun.elapsed() < whole / 2, "stream {stream}: {:?} of {whole:?}", begun.elapsed());
    }
}

#[test]
fn a_signal_ends_the_server_cleanly_and_a_port_that_is_taken_is_one_error() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch);
    let port = server.address.rsplit(':').next().unwrap();
    scratch.refuses(&format!("serve policy --port {port}"), 1, &["port ", "taken by another program", "--port"]);
    scratch.refuses("serve policy --port 70000", 2, &["port = 70000", "at most 65535"]);
    scratch.refuses("serve policy --port 0 --host 192.0.2.1", 2, &["--host 192.0.2.1", "an address of this machine"]);
    scratch.refuses("serve nothing --port 0", 1, &["nothing"]);
    scratch.refuses("serve reward --port 0", 1, &["reward"]);
    // One client has an open connection, one waits for its response.
    let idle = TcpStream::connect(&server.address).unwrap();
    let long = json!({"model": "policy", "prompt": vec!["a"; 8], "n": 128, "max_tokens": 60});
    let waiting = server.open("POST", TEXT, "Content-Type: application/json\r\n", &long.to_string());
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let ran = server.interrupt();
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ""), "{}", ran.stderr);
    assert!(ran.stderr.contains("stopping") && !ran.stderr.contains("error"), "{}", ran.stderr);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let answer = Answer::read(waiting);
    assert!(answer.status == 503 && answer.body.contains("the server stops"), "{}", answer.body);
    drop(idle);
}

#[test]
fn an_encoder_decoder_completes_prompts_and_has_no_log_probabilities_of_their_tokens() {
    let scratch = crate::encoder_decoder_training::scratch();
    std::fs::rename(scratch.path("policy"), scratch.path("decoder")).unwrap();
    std::fs::rename(scratch.path("t5"), scratch.path("policy")).unwrap();
    let rows = json_lines(
        &scratch.succeeds("generate --model policy --dataset_name prompts.jsonl --max_new_tokens 6 --do_sample false"),
    );
    let server = Server::start(&scratch);
    let body = |more: Value| {
        let mut body = json!({"prompt": crate::cli::PROMPTS.to_vec(), "max_tokens": 6, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let found = texts(&server.completes(TEXT, body(json!({}))).json());
    let expected: Vec<&str> = rows.iter().map(|row| row["completion"].as_str().unwrap()).collect();
    assert_eq!(found, expected);
    let echoed = texts(&server.completes(TEXT, body(json!({"echo": true}))).json());
    let both = crate::cli::PROMPTS.iter().zip(expected).map(|(prompt, text)| format!("{prompt}{text}"));
    assert_eq!(echoed, both.collect::<Vec<_>>());
    let refused = server.post(TEXT, &body(json!({"model": "policy", "echo": true, "logprobs": 0})));
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("`echo` with `logprobs`: an encoder reads the prompt"), "{}", refused.body);
}
