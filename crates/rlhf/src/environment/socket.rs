//! A WebSocket with JSON messages, whose reads have a time limit.

use rlhf_base::files;
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tungstenite::client::IntoClientRequest;
use tungstenite::handshake::HandshakeError;
use tungstenite::http::{HeaderValue, Uri, header};
use tungstenite::protocol::WebSocketConfig;
use tungstenite::{Message, WebSocket};

/// Maximum size of a message in bytes.
const MAX_MESSAGE: usize = 32 << 20;
/// Time limit of a read that takes only what has already arrived.
const AT_ONCE: Duration = Duration::from_millis(1);

/// An open connection.
pub(super) struct Socket(WebSocket<Stream>);

/// A connection without or with TLS.
enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Socket {
    /// Connects to an address that begins with ws:// or wss://. `token` is sent as a bearer token.
    ///
    /// # Errors
    /// If there is no connection within `limit`. The error is one line.
    pub(super) fn connect(url: &str, token: Option<&str>, limit: Duration) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|e| format!("not an address: {e}"))?;
        let is_tls = uri.scheme_str() == Some("wss");
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_string();
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let tcp = connect((&host, port), limit).map_err(|e| format!("cannot connect: {e}"))?;
        tcp.set_read_timeout(Some(limit))
            .and_then(|()| tcp.set_write_timeout(Some(limit)))
            .map_err(|e| e.to_string())?;
        tcp.set_nodelay(true).map_err(|e| e.to_string())?;
        let stream = match is_tls.then(roots).transpose().map_err(|e| e.to_string())? {
            Some(roots) => Stream::Tls(Box::new(encrypted(tcp, &host, roots)?)),
            None => Stream::Plain(tcp),
        };
        let mut request = uri.into_client_request().map_err(|e| format!("not an address: {e}"))?;
        if let Some(token) = token {
            let value = HeaderValue::from_str(&format!("Bearer {token}"));
            let mut value = value.map_err(|_| "the token has a character that cannot be sent".to_string())?;
            value.set_sensitive(true);
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
        match tungstenite::client::client_with_config(request, stream, Some(config)) {
            Ok((socket, _)) => Ok(Self(socket)),
            Err(HandshakeError::Interrupted(_)) => Err(format!("no reply within {} s", limit.as_secs_f64())),
            Err(HandshakeError::Failure(error)) => Err(match error {
                tungstenite::Error::Http(response) => {
                    format!("expected a WebSocket, found the HTTP status {}", response.status())
                }
                other => other.to_string(),
            }),
        }
    }

    /// Sends a message, and returns the next one.
    ///
    /// # Errors
    /// If no message comes within `limit`, the connection is closed, or the message is not JSON. The error is one line.
    pub(super) fn ask(&mut self, message: &Value, limit: Duration) -> Result<Value, String> {
        let until = Instant::now() + limit;
        self.0.send(Message::text(message.to_string())).map_err(|e| self.closed(&e))?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("no reply within {} s", limit.as_secs_f64()));
            }
            if let Some(text) = self.read(left)? {
                let found = || beginning(&one_line(&text), 80).into_owned();
                return serde_json::from_str(&text).map_err(|_| format!("expected JSON, found {}", found()));
            }
        }
    }

    /// Replies to the pings that have arrived, because servers close connections that do not reply.
    ///
    /// # Errors
    /// If the connection is closed, or a message arrived that was not asked for.
    pub(super) fn keep(&mut self) -> Result<(), String> {
        match self.read(AT_ONCE)? {
            None => Ok(()),
            Some(text) => Err(format!("a message that nothing asked for: {}", beginning(&one_line(&text), 80))),
        }
    }

    /// Sends a last message, and closes the connection without waiting for the server.
    pub(super) fn close(&mut self, message: &Value) {
        let _ = self.0.send(Message::text(message.to_string()));
        let _ = self.0.close(None).and_then(|()| self.0.flush());
    }

    /// Reads frames until a text message comes; `None` if none comes within `limit`.
    fn read(&mut self, limit: Duration) -> Result<Option<String>, String> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(AT_ONCE);
            self.0.get_ref().tcp().set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
            match self.0.read() {
                Ok(Message::Text(text)) => return Ok(Some(text.as_str().to_string())),
                Ok(Message::Close(frame)) => {
                    let why = frame.map_or(String::new(), |frame| format!(" ({})", frame.code));
                    return Err(format!("the server closed the connection{why}"));
                }
                Ok(Message::Binary(_)) => return Err("expected text, found a binary message".into()),
                Ok(_) => self.0.flush().map_err(|e| self.closed(&e))?,
                Err(tungstenite::Error::Io(e)) if is_timeout(&e) => {}
                Err(e) => return Err(self.closed(&e)),
            }
            if Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    fn closed(&self, error: &tungstenite::Error) -> String {
        match error {
            tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed => {
                "the server closed the connection".into()
            }
            tungstenite::Error::Io(e) if is_timeout(e) => "the server reads nothing".into(),
            // A server that ends with messages of ours unread resets the connection.
            tungstenite::Error::Io(e) if is_closed(e) => "the server closed the connection".into(),
            tungstenite::Error::Protocol(_) if !self.0.can_read() => "the server closed the connection".into(),
            tungstenite::Error::Capacity(_) => {
                format!("expected messages of at most {MAX_MESSAGE} bytes, found a longer one")
            }
            other => format!("the connection failed: {other}"),
        }
    }
}

fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Connects to the first of the host's addresses that accepts.
fn connect(host: (&String, u16), limit: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host.0.as_str(), host.1).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns the certificate authorities of `SSL_CERT_FILE`, or Mozilla's.
fn roots() -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) else {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        return Ok(roots);
    };
    let path = Path::new(&file);
    let text = files::read(path)
        .map_err(|error| Error::Usage(format!("SSL_CERT_FILE: the certificates cannot be read: {error}")))?;
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let wrong = |error: String| Error::invalid(path, format!("SSL_CERT_FILE: not valid PEM: {error}"));
        roots.add(certificate.map_err(|e| wrong(e.to_string()))?).map_err(|e| wrong(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(Error::invalid(path, "SSL_CERT_FILE: expected certificates in PEM, found none"));
    }
    Ok(roots)
}

fn encrypted(
    tcp: TcpStream,
    host: &str,
    roots: RootCertStore,
) -> Result<StreamOwned<ClientConnection, TcpStream>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(host.to_string()).map_err(|e| format!("not the name of a host: {e}"))?;
    let connection = ClientConnection::new(Arc::new(config), name).map_err(|e| e.to_string())?;
    Ok(StreamOwned::new(connection, tcp))
}

impl Stream {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(stream) => &stream.sock,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}
