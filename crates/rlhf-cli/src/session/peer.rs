//! The connection to the client: standard input and output, or a Unix socket for one client.

use rlhf::signals::{clean_up_on_signals, end_process};
use rlhf::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::{self, Permissions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time between two looks at a session whose client is gone.
const POLL: Duration = Duration::from_millis(20);

/// Bytes of the buffers of both directions.
const BUFFER: usize = 1 << 16;

/// Both directions of a connection.
pub(super) struct Peer {
    pub(super) input: Box<dyn io::BufRead + Send>,
    pub(super) output: Box<dyn Write>,
    pub(super) course: Arc<Course>,
}

/// The state of a session, for the thread that watches its client.
#[derive(Debug, Default)]
pub(super) struct Course {
    /// A request is computed.
    pub(super) is_busy: AtomicBool,
    /// The session is at its end, and a client that leaves is no failure.
    pub(super) is_over: AtomicBool,
}

impl Peer {
    /// Standard input and output.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn standard() -> Result<Self> {
        Self::new(io::stdin(), io::stdout(), io::stdout())
    }

    /// Waits for one client at a socket that only this user can open. `ready` is called when it can connect; then the socket is removed. A
    /// signal that ends the program removes it too.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub(super) fn at(path: &Path, ready: impl FnOnce() -> Result<()>) -> Result<Self> {
        let listener = bind(path).map_err(Error::io("make the socket", path))?;
        let removed = Removed(path.to_path_buf());
        let socket = Arc::new(Mutex::new(Some(removed)));
        let at_end = Arc::clone(&socket);
        let take = |socket: &Mutex<Option<Removed>>| drop(socket.lock().unwrap_or_else(PoisonError::into_inner).take());
        clean_up_on_signals(move || take(&at_end));
        ready().inspect_err(|_| take(&socket))?;
        let failed = Error::io("wait for a client at the socket", path);
        let ends = listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream.try_clone()?, stream)));
        // Another session may have a socket of this name from here on.
        take(&socket);
        let (input, output, watched): (UnixStream, UnixStream, UnixStream) = ends.map_err(failed)?;
        Self::new(input, output, watched)
    }

    fn new(
        input: impl Read + Send + 'static,
        output: impl Write + 'static,
        watched: impl AsFd + Send + 'static,
    ) -> Result<Self> {
        let course = Arc::new(Course::default());
        watch(watched, Arc::clone(&course))?;
        Ok(Self {
            input: Box::new(BufReader::with_capacity(BUFFER, input)),
            output: Box::new(BufWriter::with_capacity(BUFFER, output)),
            course,
        })
    }
}

/// A socket's file that is removed when this is dropped.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Makes the socket under another name, in a folder that only this user can open, so that it has its permissions when it appears at `path`.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file of this name"));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let private_dir = parent.join(format!(".rlhf-{}", std::process::id()));
    fs::DirBuilder::new().create(&private_dir)?;
    let made = fs::set_permissions(&private_dir, Permissions::from_mode(0o700)).and_then(|()| {
        let temporary = private_dir.join("socket");
        let listener = UnixListener::bind(&temporary)?;
        fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
        fs::rename(&temporary, path)?;
        Ok(listener)
    });
    let _ = fs::remove_dir_all(&private_dir);
    made
}

/// Ends the process, and the programs that it has started, once the client cannot read replies any more and a request is computed. Between
/// requests the session ends by itself, at the end of its input.
fn watch(output: impl AsFd + Send + 'static, course: Arc<Course>) -> Result<()> {
    let wait = move || {
        loop {
            // Errors and hang-ups are reported in any case.
            let mut polled = [PollFd::new(&output, PollFlags::empty())];
            match poll(&mut polled, None) {
                Ok(_) if polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) => break,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
        while !course.is_over.load(Ordering::Acquire) {
            if !course.is_busy.load(Ordering::Acquire) {
                std::thread::sleep(POLL);
                continue;
            }
            let _ = writeln!(io::stderr(), "error: the client of the session is gone");
            end_process(1);
        }
    };
    let thread = std::thread::Builder::new().name("client".into()).spawn(wait);
    thread.map(drop).map_err(Error::io("start a thread for", "the client"))
}
