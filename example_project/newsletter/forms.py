from django import forms

from .models import Subscriber


class SignUpForm(forms.ModelForm):
    class Meta:
        model = Subscriber
        fields = ["name", "email"]
        labels = {"name": "Your name", "email": "Your e-mail address"}
        widgets = {
            "name": forms.TextInput(attrs={"autocomplete": "name"}),
            "email": forms.EmailInput(attrs={"autocomplete": "email", "spellcheck": "false"}),
        }
