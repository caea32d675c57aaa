//! The pages of the server: requests in, jobs for the model out.

use super::api::{Endpoint, Request, Served};
use super::engine::{Job, Reply};
use super::error::ApiError;
use super::room::{BODY_LIMIT, Room};
use crate::http_server::{BodyError, is_loopback_origin, json_response, read_body};
use axum::extract::{self, Path, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use serde_json::json;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use tokio::sync::{Semaphore, oneshot};

/// The state of the pages.
pub(super) struct Service {
    pub(super) served: Served,
    pub(super) queue: SyncSender<Job>,
    /// One permit for each byte of a body.
    pub(super) room: Arc<Semaphore>,
}

/// Returns the pages.
pub(super) fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/health", get(|| async { json_response(200, &json!({"status": "ok"})) }))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .fallback(no_page)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(share_with_pages))
        .with_state(service)
}

/// Lets pages of this machine read responses, whatever address the server has.
async fn share_with_pages(request: extract::Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).filter(|origin| is_loopback_origin(origin)).cloned();
    let Some(origin) = origin else { return next.run(request).await };
    let asks =
        request.method() == Method::OPTIONS && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if asks { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("origin"));
    if asks {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
    }
    response
}

async fn models(State(service): State<Arc<Service>>) -> Response {
    json_response(200, &json!({"object": "list", "data": [service.served.to_json()]}))
}

async fn model(State(service): State<Arc<Service>>, Path(name): Path<String>) -> Response {
    match service.served.check(&name) {
        Ok(()) => json_response(200, &service.served.to_json()),
        Err(error) => error.into_response(),
    }
}

async fn completions(State(service): State<Arc<Service>>, request: extract::Request) -> Response {
    service.respond(Endpoint::Completions, request).await.unwrap_or_else(ApiError::into_response)
}

async fn chat(State(service): State<Arc<Service>>, request: extract::Request) -> Response {
    service.respond(Endpoint::Chat, request).await.unwrap_or_else(ApiError::into_response)
}

async fn no_page(method: Method, uri: Uri) -> ApiError {
    ApiError::page(404, format!("there is no page {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::page(405, format!("the page {} has another method than {method}", uri.path()))
}

impl Service {
    /// Responds to a request by the model. Dropped if the client is gone, which ends its generation.
    async fn respond(&self, endpoint: Endpoint, request: extract::Request) -> Result<Response, ApiError> {
        let mut room = Room::of(&self.room);
        let body = read_body(request, BODY_LIMIT, |bytes| room.take(bytes)).await.map_err(|error| match error {
            BodyError::OverBudget => {
                ApiError::unavailable("the requests that wait have too many bytes together: try again later")
            }
            BodyError::TooLarge => {
                ApiError::page(413, format!("expected a body of at most {BODY_LIMIT} bytes, found more"))
            }
            BodyError::TooSlow(pause) => {
                ApiError::page(408, format!("expected the rest of the body, found none for {} s", pause.as_secs()))
            }
            BodyError::Broken => {
                ApiError::page(400, "expected a whole body, found an end or an error within it".into())
            }
        })?;
        let request = Request::parse(endpoint, &body, &self.served)?;
        drop(body);
        let (reply, response) = oneshot::channel();
        self.queue.try_send(Job { request, reply, room }).map_err(|error| match error {
            TrySendError::Full(_) => ApiError::unavailable("too many requests wait: try again later"),
            TrySendError::Disconnected(_) => ApiError::unavailable("the server stops"),
        })?;
        match response.await.unwrap_or_else(|_| Err(ApiError::unavailable("the server stops")))? {
            Reply::Whole(value) => Ok(json_response(200, &value)),
            Reply::Stream(events) => Ok(events.into_response()),
        }
    }
}
