from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from .forms import SignUpForm
from .jobs import send_welcome
from .models import Subscriber


def sign_up(request: HttpRequest) -> HttpResponse:
    form = SignUpForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            # One transaction: no subscriber without a welcome to come, no welcome to somebody who is not there.
            with transaction.atomic():
                subscriber = form.save()
                send_welcome.enqueue(subscriber_id=subscriber.pk)
        except IntegrityError:  # a double click: the same address came in after the form had looked
            form.add_error("email", "This address has signed up already.")
        else:
            return redirect("thanks")
    return render(request, "newsletter/sign_up.html", {"form": form, "state": Subscriber.objects.state()})


def thanks(request: HttpRequest) -> HttpResponse:
    return render(request, "newsletter/thanks.html", {"state": Subscriber.objects.state()})
