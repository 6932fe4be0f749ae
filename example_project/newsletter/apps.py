from django.apps import AppConfig


class NewsletterConfig(AppConfig):
    name = "example_project.newsletter"
