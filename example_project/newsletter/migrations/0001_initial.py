import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Digest",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("until", models.DateTimeField(unique=True)),
                ("signups", models.IntegerField(verbose_name="sign-ups")),
                ("sent_at", models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={"ordering": ["-until"]},
        ),
        migrations.CreateModel(
            name="Subscriber",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                (
                    "email",
                    models.EmailField(
                        error_messages={"unique": "This address has signed up already."},
                        max_length=254,
                        unique=True,
                        verbose_name="e-mail address",
                    ),
                ),
                (
                    "source",
                    models.CharField(default="sign-up page", editable=False, max_length=30, verbose_name="came from"),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_index=True,
                        default=django.utils.timezone.now,
                        editable=False,
                        verbose_name="signed up",
                    ),
                ),
                ("welcomed_at", models.DateTimeField(editable=False, null=True, verbose_name="welcomed")),
                (
                    "problem",
                    models.CharField(blank=True, editable=False, max_length=200, verbose_name="could not be reached"),
                ),
            ],
            options={"ordering": ["-created_at", "-pk"]},
        ),
    ]
