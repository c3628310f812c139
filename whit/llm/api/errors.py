"""Errors that a client sees: a status and the body that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any

from whit.helpers import WhitError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class ApiError(WhitError):
    """A request that is answered with an error. `param` names the part of the body that is wrong, as a path
    (`messages[0].role`); `code` is a word for programs.

    >>> error = ApiError("temperature is 9", because="it goes from 0 to 2", param="temperature")
    >>> error.status, error.body()["error"]["param"], error.body()["error"]["type"]
    (400, 'temperature', 'invalid_request_error')
    """

    def __init__(
        self,
        asked: str,
        because: str = "",
        fix: str = "",
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(asked, because, fix)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            self.asked,
            self.because,
            self.fix,
            self.status,
            self.param,
            self.code,
            self.headers,
        )

    def body(self) -> dict[str, Any]:
        """The JSON body: {"error": {"message", "type", "param", "code"}}."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _rebuild(
    asked: str,
    because: str,
    fix: str,
    status: int,
    param: str | None,
    code: str | None,
    headers: dict[str, str],
) -> ApiError:
    return ApiError(asked, because, fix, status=status, param=param, code=code, headers=headers)
