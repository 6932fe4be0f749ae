from django.contrib import admin

from .models import Digest, Subscriber


@admin.register(Subscriber)
class SubscriberAdmin(admin.ModelAdmin):
    list_display = ["name", "email", "problem", "welcomed_at", "created_at"]
    list_filter = [("welcomed_at", admin.EmptyFieldListFilter), ("problem", admin.EmptyFieldListFilter)]
    search_fields = ["name", "email"]
    readonly_fields = ["source", "created_at", "welcomed_at", "problem"]


@admin.register(Digest)
class DigestAdmin(admin.ModelAdmin):
    list_display = ["until", "signups", "sent_at"]
