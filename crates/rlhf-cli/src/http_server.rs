//! HTTP/1.1 on one address of this machine, for `rlhf serve` and `rlhf watch`. The routes belong to the caller.
//!
//! The server runs on its own thread, so that the caller's thread can own the model. On a loopback address it refuses requests that
//! a web page of another site makes through the user's browser.

use axum::Router;
use axum::extract::Request;
use axum::http::uri::{Authority, Uri};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rlhf::{Error, Result};
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Time that open connections have to end once the server is stopped.
const GRACE: Duration = Duration::from_secs(1);

/// Limits on clients: how many at once, and how long one may be idle. If all places are taken, the client that has been sending its
/// request for longest loses its place to the next one, so that clients that send a byte now and then shut out nobody.
#[derive(Clone, Copy)]
struct Limits {
    /// Open connections at once, below the 1024 open files that a process may have by default; others wait until one is closed.
    connections: usize,
    /// Time for the line and the headers of a request, from the end of the one before.
    headers: Duration,
    /// Time that a client has to send a request before it may lose its place.
    patience: Duration,
}

const LIMITS: Limits = Limits { connections: 512, headers: Duration::from_secs(60), patience: Duration::from_secs(5) };

/// Time without a part of a request's body after which it is given up.
const BODY_PAUSE: Duration = Duration::from_secs(60);

/// A bound address, on which connections already wait. Binding comes before slow work such as loading a model, so that a port that
/// is taken is reported at once.
pub(crate) struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds `port` of `host`, a name or an address of this machine. Port 0 is a free port, which the system chooses.
    ///
    /// # Errors
    /// If the port is taken, or needs more rights; if `host` is no address of this machine.
    pub(crate) fn bind(host: &str, port: u16) -> Result<Self> {
        let bound = TcpListener::bind((host, port)).and_then(|socket| {
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok(Self { socket, address })
        });
        bound.map_err(|error| refused(host, port, &error))
    }

    /// The address as a link, with the port that the system chose: `http://127.0.0.1:8000`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Starts answering with `router`, until the returned [`Server`] is dropped.
    ///
    /// # Errors
    /// If the system refuses a thread or the polling of sockets.
    pub(crate) fn serve(self, router: Router) -> Result<Server> {
        let failed = |error: io::Error| Error::Run(format!("{}: cannot start the HTTP server: {error}", self.address));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::TcpListener::from_std(self.socket).map_err(failed)?
        };
        let router = if self.address.ip().is_loopback() {
            router.layer(middleware::from_fn(refuse_other_sites))
        } else {
            router
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("http".into());
        let thread = thread.spawn(move || runtime.block_on(run(listener, router, LIMITS, stopped))).map_err(failed)?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

/// The error of an address that could not be bound.
fn refused(host: &str, port: u16, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::AddrInUse => Error::Run(format!(
            "port {port} of {host} is taken by another program: choose another with --port; 0 is any free one"
        )),
        io::ErrorKind::PermissionDenied => Error::Usage(format!(
            "port {port} of {host}: {error}: ports below 1024 need more rights; choose another with --port"
        )),
        _ => Error::Usage(format!("--host {host}: expected an address of this machine: {error}")),
    }
}

/// A running server. Dropping it closes its port and ends its connections, after at most a second.
pub(crate) struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves until `stopped` is dropped or sent, then lets requests in progress end for [`GRACE`].
async fn run(listener: tokio::net::TcpListener, router: Router, limits: Limits, mut stopped: oneshot::Receiver<()>) {
    let open = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut clients = Clients::new(limits.patience);
    loop {
        let accepted = async {
            let accepted = listener.accept().await;
            (accepted, clients.place(&places).await)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            _ = &mut stopped => break,
        };
        let Ok((stream, _)) = accepted else {
            // The client is gone, or the process has too many open files: others may end.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Events of a stream are smaller than a packet, and each is waited for.
        let _ = stream.set_nodelay(true);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.headers);
        let (whole, closed) = clients.add();
        let router = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(whole.clone());
            router.call(request)
        });
        let connection = open.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            tokio::select! {
                // An error of a connection concerns its client alone.
                _ = connection => {}
                _ = closed => {}
            }
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(GRACE, open.shutdown()).await;
}

/// Whether the body of a connection's request has arrived as a whole: a response to it may take long.
#[derive(Clone, Default)]
struct IsWhole(Arc<AtomicBool>);

/// The clients that have connections, in the order in which they came.
struct Clients {
    open: VecDeque<(Instant, IsWhole, oneshot::Sender<()>)>,
    patience: Duration,
}

impl Clients {
    fn new(patience: Duration) -> Self {
        Self { open: VecDeque::new(), patience }
    }

    /// Adds a client. Returns the state of its request, and the receiver that closes its connection.
    fn add(&mut self) -> (IsWhole, oneshot::Receiver<()>) {
        let (close, closed) = oneshot::channel();
        let whole = IsWhole::default();
        self.open.retain(|(_, _, close)| !close.is_closed());
        self.open.push_back((Instant::now(), whole.clone(), close));
        (whole, closed)
    }

    /// Waits for a place. If there is none, closes the oldest connection whose request is not whole, once `patience` has passed for it.
    async fn place(&mut self, places: &Arc<Semaphore>) -> OwnedSemaphorePermit {
        loop {
            if let Ok(place) = Arc::clone(places).try_acquire_owned() {
                return place;
            }
            self.open.retain(|(_, _, close)| !close.is_closed());
            let slow = self.open.iter().position(|(_, whole, _)| !whole.0.load(Ordering::Relaxed));
            let left = slow.map(|at| self.patience.saturating_sub(self.open[at].0.elapsed()));
            match (slow, left) {
                (Some(at), Some(Duration::ZERO)) => {
                    if let Some((_, _, close)) = self.open.remove(at) {
                        let _ = close.send(());
                    }
                    // Its place is free once its task has ended.
                    return Arc::clone(places).acquire_owned().await.expect("it is never closed");
                }
                // Others may end, or send the rest of their requests, before.
                (_, left) => {
                    let wait = left.unwrap_or(self.patience).min(Duration::from_millis(200));
                    let place = Arc::clone(places).acquire_owned();
                    if let Ok(place) = tokio::time::timeout(wait, place).await {
                        return place.expect("it is never closed");
                    }
                }
            }
        }
    }
}

/// A body that could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// It has more bytes than the limit.
    TooLarge,
    /// No part of it came for this time.
    TooSlow(Duration),
    /// The connection was closed within it, or it is malformed.
    Broken,
    /// The bodies of the requests that wait have no more memory left for it.
    OverBudget,
}

/// Reads the body of a request of at most `limit` bytes. `reserve` is called with the size of each part before it is kept, and returns
/// false where the memory for the bodies of all requests is used up.
///
/// # Errors
/// If it is longer, ends early, pauses too long, or `reserve` returns false.
pub(crate) async fn read_body(
    request: Request,
    limit: usize,
    reserve: impl FnMut(usize) -> bool,
) -> Result<Vec<u8>, BodyError> {
    body_within(request, limit, BODY_PAUSE, reserve).await
}

async fn body_within(
    request: Request,
    limit: usize,
    pause: Duration,
    mut reserve: impl FnMut(usize) -> bool,
) -> Result<Vec<u8>, BodyError> {
    let whole = request.extensions().get::<IsWhole>().cloned().unwrap_or_default();
    // The connection may have been kept after an earlier request, which was whole.
    whole.0.store(false, Ordering::Relaxed);
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: usize| length > limit) {
        return Err(BodyError::TooLarge);
    }
    // A body of unknown length is limited while it is read.
    let mut parts = request.into_body().into_data_stream();
    let mut body = Vec::new();
    loop {
        let next = poll_fn(|context| Pin::new(&mut parts).poll_next(context));
        match tokio::time::timeout(pause, next).await {
            Err(_) => return Err(BodyError::TooSlow(pause)),
            Ok(None) => {
                whole.0.store(true, Ordering::Relaxed);
                return Ok(body);
            }
            Ok(Some(Err(_))) => return Err(BodyError::Broken),
            Ok(Some(Ok(part))) if body.len() + part.len() > limit => return Err(BodyError::TooLarge),
            Ok(Some(Ok(part))) if !reserve(part.len()) => return Err(BodyError::OverBudget),
            Ok(Some(Ok(part))) => body.extend_from_slice(&part),
        }
    }
}

/// Refuses a request whose `Host` or `Origin` is not this machine: a browser sends it for a page of another site, whose name may
/// even lead to 127.0.0.1 (DNS rebinding).
async fn refuse_other_sites(request: Request, next: Next) -> Response {
    if is_of_this_machine(request.headers()) {
        return next.run(request).await;
    }
    let message = "requests from other sites are refused: this server is for programs on this machine\n";
    (StatusCode::FORBIDDEN, message).into_response()
}

/// Returns whether `Host` and `Origin`, where present, name a loopback address.
fn is_of_this_machine(headers: &HeaderMap) -> bool {
    let host = headers
        .get(header::HOST)
        .is_none_or(|host| Authority::try_from(host.as_bytes()).is_ok_and(|authority| is_loopback(authority.host())));
    host && headers.get(header::ORIGIN).is_none_or(is_loopback_origin)
}

/// Returns whether a page of this `Origin` is of a loopback address.
pub(crate) fn is_loopback_origin(origin: &HeaderValue) -> bool {
    Uri::try_from(origin.as_bytes()).is_ok_and(|origin| origin.host().is_some_and(is_loopback))
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Returns a response with this status and the JSON of `value`.
pub(crate) fn json_response(status: u16, value: &Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Sends server-sent events to one client, from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    sender: mpsc::Sender<Event>,
    /// Set once the client has left [`MOST_EVENTS`] unread.
    is_behind: Arc<AtomicBool>,
}

/// Most events that wait for a client. One that reads nothing would fill the memory.
const MOST_EVENTS: usize = 16_384;

impl Events {
    /// Creates a sender of events, and the stream that a page returns as its response. The response ends when the sender and its clones
    /// are dropped.
    pub(crate) fn channel() -> (Self, EventStream) {
        let (sender, receiver) = mpsc::channel(MOST_EVENTS);
        (Self { sender, is_behind: Arc::default() }, EventStream(receiver))
    }

    /// Sends an event with this data: JSON, or other text without carriage returns. Returns false once the client is gone, or has left
    /// too many events unread.
    pub(crate) fn send(&self, data: &str) -> bool {
        if self.is_closed() {
            return false;
        }
        let sent = self.sender.try_send(Event::default().data(data));
        if matches!(sent, Err(TrySendError::Full(_))) {
            self.is_behind.store(true, Ordering::Relaxed);
        }
        sent.is_ok()
    }

    /// Returns whether the client is gone, or counts as gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed() || self.is_behind.load(Ordering::Relaxed)
    }
}

/// The events of one response.
#[derive(Debug)]
pub(crate) struct EventStream(mpsc::Receiver<Event>);

/// To be called on the server's thread, whose timer it uses. A comment is sent every 15 s without events, so that proxies keep the
/// connection open.
impl IntoResponse for EventStream {
    fn into_response(self) -> Response {
        Sse::new(self).keep_alive(KeepAlive::default()).into_response()
    }
}

impl Stream for EventStream {
    type Item = Result<Event, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().0.poll_recv(context).map(|event| event.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    #[test]
    fn requests_that_name_another_host_or_origin_are_refused() {
        let headers = |pairs: &[(header::HeaderName, &str)]| {
            pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect::<HeaderMap>()
        };
        for host in ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000"] {
            assert!(is_of_this_machine(&headers(&[(header::HOST, host)])), "{host}");
            let origin = format!("http://{host}");
            assert!(is_of_this_machine(&headers(&[(header::ORIGIN, &origin)])), "{origin}");
        }
        assert!(is_of_this_machine(&HeaderMap::new()));
        for host in ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "a b"] {
            assert!(!is_of_this_machine(&headers(&[(header::HOST, host)])), "{host}");
        }
        for origin in ["null", "http://evil.example", "https://127.0.0.1.evil.example", "file://"] {
            let request_headers = headers(&[(header::HOST, "127.0.0.1"), (header::ORIGIN, origin)]);
            assert!(!is_of_this_machine(&request_headers), "{origin}");
        }
    }

    #[test]
    fn a_client_that_reads_no_event_counts_as_gone() {
        let (events, stream) = Events::channel();
        assert!((0..MOST_EVENTS).all(|_| events.send("{}")) && !events.is_closed());
        assert!(!events.send("{}") && events.is_closed() && !events.send("{}"));
        drop(stream);
        let (events, stream) = Events::channel();
        drop(stream);
        assert!(events.is_closed() && !events.send("{}"));
    }

    /// A server with these limits, whose page returns the body of a request.
    fn limited(limits: Limits, pause: Duration) -> (SocketAddr, Server) {
        let Listener { socket, address } = Listener::bind("127.0.0.1", 0).unwrap();
        let echo = move |request: Request| async move {
            match body_within(request, 8, pause, |_| true).await {
                Ok(body) => (StatusCode::OK, String::from_utf8(body).unwrap()),
                Err(error) => (StatusCode::BAD_REQUEST, format!("{error:?}")),
            }
        };
        let router = Router::new().route("/", axum::routing::post(echo));
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(socket).unwrap();
                run(listener, router, limits, stopped).await;
            });
        });
        (address, Server { stop: Some(stop), thread: Some(thread) })
    }

    /// Sends `text`, and returns the status and the body of the response; both are empty if the connection is closed.
    fn exchange(connection: &mut TcpStream, text: &str) -> (String, String) {
        connection.write_all(text.as_bytes()).unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut response = String::new();
        let mut buffer = [0; 1024];
        while !response.contains("\r\n\r\n") {
            match connection.read(&mut buffer).unwrap() {
                0 => return Default::default(),
                read => response.push_str(std::str::from_utf8(&buffer[..read]).unwrap()),
            }
        }
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().into(), body.into())
    }

    const PAUSE: Duration = Duration::from_millis(300);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn clients_that_send_a_byte_now_and_then_shut_out_nobody() {
        let limits = Limits { connections: 3, headers: LONG, patience: Duration::from_millis(50) };
        let (address, _server) = limited(limits, LONG);
        let post = |length: usize, body: &str| {
            format!("POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
        };
        let slow: Vec<TcpStream> = ["POST / HT".to_string(), post(8, "a"), post(8, "ab")]
            .into_iter()
            .map(|start| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(start.as_bytes()).unwrap();
                stream
            })
            .collect();
        let began = Instant::now();
        for _ in 0..2 {
            let response = exchange(&mut TcpStream::connect(address).unwrap(), &post(4, "text"));
            assert_eq!(response, ("200".into(), "text".into()));
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        drop(slow);
    }

    #[test]
    fn a_client_that_is_slow_or_sends_too_much_is_told_and_holds_no_place() {
        let (address, _server) = limited(Limits { connections: 1, headers: PAUSE, patience: LONG }, PAUSE);
        let connect = || TcpStream::connect(address).unwrap();
        let post = |headers: &str, body: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n{body}");
        let close = "Connection: close\r\n";
        // The only place is that of a client that never ends its headers; the next one waits for it.
        let mut slow = connect();
        slow.write_all(b"POST / HTTP/1.1\r\nHost: a").unwrap();
        let length = |length: usize| format!("{close}Content-Length: {length}");
        let response = |text: &str| exchange(&mut connect(), text);
        assert_eq!(response(&post(&length(4), "text")), ("200".into(), "text".into()));
        let mut rest = String::new();
        slow.read_to_string(&mut rest).unwrap();
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 408"), "{rest}");
        let refused = |error: &str| ("400".into(), error.to_string());
        assert_eq!(response(&post(&length(9), "")), refused("TooLarge"));
        let chunked = format!("{close}Transfer-Encoding: chunked");
        assert_eq!(response(&post(&chunked, "4\r\ntext\r\n5\r\ntexts\r\n")), refused("TooLarge"));
        assert_eq!(response(&post(&length(4), "te")), refused("TooSlow(300ms)"));
        assert_eq!(response(&post(&chunked, "not a length\r\n")), refused("Broken"));
        // A connection is kept for the next request.
        let mut kept = connect();
        for text in ["one", "two"] {
            let request = post("Content-Length: 3", text);
            assert_eq!(exchange(&mut kept, &request), ("200".into(), text.into()));
        }
    }

    #[test]
    fn a_port_that_is_taken_is_one_line_with_a_hint() {
        let first = Listener::bind("127.0.0.1", 0).unwrap();
        let port = first.address.port();
        let error = Listener::bind("127.0.0.1", port).err().unwrap();
        let expected = format!(
            "port {port} of 127.0.0.1 is taken by another program: choose another with --port; 0 is any free one"
        );
        assert_eq!(error.to_string(), expected);
        let error = Listener::bind("192.0.2.1", 0).err().unwrap();
        assert!(error.to_string().starts_with("--host 192.0.2.1: expected an address of this machine: "), "{error}");
    }
}
