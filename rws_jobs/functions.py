"""Job functions: what ``@job`` makes of a function, and what can be done with it."""

import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from asgiref.sync import sync_to_async

from . import payload, registry
from .enqueueing import Enqueued, Message, Options, build, checked_options, insert
from .outcomes import BackoffPolicy
from .text import check_job_type

P = ParamSpec("P")
R = TypeVar("R")


class JobFunction(registry.Handler, Generic[P, R]):
    """A function that is also a job. Calling it runs it here and now; ``enqueue`` lets a worker run it."""

    def __init__(
        self,
        function: Callable[P, R],
        job_type: str,
        options: Options,
        backoff: BackoffPolicy | None,
        atomic: bool,
    ) -> None:
        super().__init__(job_type, function)
        self.options = checked_options(options)
        self.backoff = backoff
        self.atomic = atomic
        self.signature = _checked_signature(function)
        parameters = self.signature.parameters.values()
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        self._names = {parameter.name for parameter in named}
        self._required = {parameter.name for parameter in named if parameter.default is parameter.empty}
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, attribute, getattr(function, attribute))
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue a run with these arguments, in the caller's transaction.

        Raises TypeError when the arguments do not fit the signature or cannot be stored, ValueError for values that
        cannot; both name the argument.
        """
        return insert(self.message(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """``enqueue()`` for async code."""
        return await sync_to_async(insert)(self.message(*args, **kwargs))

    def message(self, *args: P.args, **kwargs: P.kwargs) -> Message:
        """A run with these arguments for ``enqueue_many()``."""
        return build(self.job_type, self.encode(*args, **kwargs), self.options)

    def using(self, **options: Unpack[Options]) -> "Using[P, R]":
        """The same job with other options: ``send.using(run_in=60).enqueue(...)``. See :class:`Options`."""
        return Using(self, checked_options(options))

    def encode(self, *args: Any, **kwargs: Any) -> str:
        """The payload for these arguments, bound to the signature: a wrong call is a TypeError here."""
        if args or not (self._required <= kwargs.keys() and (self._takes_any or kwargs.keys() <= self._names)):
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.where}{self.signature}: {error}") from None
            kwargs = _named(bound)
        return payload.encode(kwargs)

    def bind(self, text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function and the arguments that a payload holds. Raises PayloadError."""
        return self.function, payload.decode(text)

    def __repr__(self) -> str:
        return f"<job {self.job_type}>"


class Using(Generic[P, R]):
    """A job function with options of its own."""

    def __init__(self, function: JobFunction[P, R], options: dict[str, Any]) -> None:
        self._function, self._options = function, options

    def using(self, **options: Unpack[Options]) -> "Using[P, R]":
        """These options, and more; of what is given twice the later holds."""
        kept = {name: value for name, value in self._options.items() if name not in options}
        return Using(self._function, checked_options({**kept, **options}))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """See :meth:`JobFunction.enqueue`."""
        return insert(self.message(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """See :meth:`JobFunction.aenqueue`."""
        return await sync_to_async(insert)(self.message(*args, **kwargs))

    def message(self, *args: P.args, **kwargs: P.kwargs) -> Message:
        """See :meth:`JobFunction.message`."""
        function = self._function
        return build(function.job_type, function.encode(*args, **kwargs), {**function.options, **self._options})


@overload
def job(name: Callable[P, R], /) -> JobFunction[P, R]: ...
@overload
def job(
    name: str | None = None,
    *,
    queue: str = "default",
    priority: int = 0,
    max_retries: int | None = None,
    backoff: BackoffPolicy | None = None,
    unique_key: str | None = None,
    atomic: bool = False,
) -> Callable[[Callable[P, R]], JobFunction[P, R]]: ...
def job(
    name: Any = None,
    *,
    queue: str = "default",
    priority: int = 0,
    max_retries: int | None = None,
    backoff: BackoffPolicy | None = None,
    unique_key: str | None = None,
    atomic: bool = False,
) -> Any:
    """Make a job of a function (``def`` or ``async def``): ``@job`` or ``@job("name", queue="mail", …)``.

    The job type is ``name``, by default the module's path without a trailing ``.jobs``, a dot and the function's
    name. ``backoff`` is a :class:`Backoff` or a callable ``(attempt, exception) -> seconds``. With ``atomic=True``
    the handler runs inside a transaction that also deletes the job's row: what it writes to the same database happens
    exactly once.

    Raises TypeError for what a worker could not call by name and named arguments (lambdas, methods, partials,
    functions inside functions without a name of their own, ``*args``, positional-only parameters), ValueError for a
    job type taken.
    """
    if callable(name):
        bare: Any = job()
        return bare(name)
    if backoff is not None and not callable(backoff):
        raise TypeError(f"backoff must be a Backoff or a callable, not {type(backoff).__name__}")
    given_type = None if name is None else check_job_type(name)
    options: Options = {"queue": queue, "priority": priority, "max_retries": max_retries, "unique_key": unique_key}

    def declare(function: Callable[P, R]) -> JobFunction[P, R]:
        plain: object = function
        if not inspect.isfunction(plain):
            raise TypeError(f"@job takes a function, not {function!r}: define one with def and call the other from it")
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            raise TypeError(
                f"@job takes no generator, and {function.__qualname__} is one: calling it would run nothing"
            )
        job_type = given_type or _default_name(function)
        declared = JobFunction(function, job_type, options, backoff, atomic)
        registry.add(declared)
        return declared

    return declare


def _default_name(function: Any) -> str:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise TypeError(
            f"{module}.{name} cannot be found by a worker: define it at the top of an importable module, "
            'or name it, @job("some.name"), where the worker imports it too'
        )
    return check_job_type(f"{module.removesuffix('.jobs')}.{name}")


def _checked_signature(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise TypeError(
                f"job {function.__qualname__}{signature}: {parameter} has no name to store it under; "
                "jobs take named arguments only"
            )
    return signature


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named
